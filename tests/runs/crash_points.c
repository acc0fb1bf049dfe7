/* A library for LD_PRELOAD that copies a folder before every system call that changes it.
 *
 * `record(folder, copies)` begins, `record(NULL, NULL)` ends. A copy is what a process leaves that is
 * killed between two calls: <copies>/<number>, with the name of the next call in <copies>/calls.
 * <copies>/<number>.synced has the files of the database as they were when they were synced last, for
 * a disk that loses with the power whatever was not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096], copies[4096];
static volatile int recording;
static int number;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
/* Copying itself makes such calls. */
static __thread int copying;

void record(const char *watched, const char *to) {
  recording = 0;
  if (watched == NULL) return;
  snprintf(folder, sizeof folder, "%s", watched);
  snprintf(copies, sizeof copies, "%s", to);
  number = 0;
  /* All that has been written before is on the disk. */
  char command[4 * 4096];
  snprintf(command, sizeof command, "mkdir '%s/synced'; cp -a '%s'/server.db* '%s/synced'",
           copies, folder, copies);
  if (system(command) != 0) fprintf(stderr, "cannot copy the database\n");
  recording = 1;
}

/* Number of the next copy. */
int recorded(void) { return number; }

static int path_is_ours(int at, const char *path) {
  char name[4096], base[4096] = "";
  if (path == NULL) return 0;
  if (path[0] == '/') return strncmp(path, folder, strlen(folder)) == 0;
  if (at == AT_FDCWD) {
    if (getcwd(base, sizeof base) == NULL) return 0;
  } else {
    snprintf(name, sizeof name, "/proc/self/fd/%d", at);
    ssize_t length = readlink(name, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = 0;
  }
  return strncmp(base, folder, strlen(folder)) == 0;
}

static int file_is_ours(int file) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strncmp(path, folder, strlen(folder)) == 0;
}

static void copy(const char *call) {
  char command[8 * 4096];
  copying = 1;
  snprintf(command, sizeof command,
           "cp -a '%s' '%s/%04d'; cp -a '%s/synced' '%s/%04d.synced'; echo %s >> '%s/calls'",
           folder, copies, number, copies, copies, number, call, copies);
  number++;
  if (system(command) != 0) fprintf(stderr, "cannot copy %s\n", folder);
  copying = 0;
}

/* All calls that change the folder follow each other, with a copy before each. */
#define CHANGE(result, name, arguments, call, ours)                      \
  static result(*real) arguments;                                        \
  if (!real) real = dlsym(RTLD_NEXT, #name);                             \
  if (!recording || copying || !(ours)) return call;                     \
  pthread_mutex_lock(&one_at_a_time);                                    \
  copy(#name);                                                           \
  result answer = call;                                                  \
  pthread_mutex_unlock(&one_at_a_time);                                  \
  return answer;

#define WRITE(name, offset_type)                                                       \
  ssize_t name(int file, const void *bytes, size_t count, offset_type offset) {        \
    CHANGE(ssize_t, name, (int, const void *, size_t, offset_type),                    \
           real(file, bytes, count, offset), file_is_ours(file))                       \
  }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

ssize_t write(int file, const void *bytes, size_t count) {
  CHANGE(ssize_t, write, (int, const void *, size_t), real(file, bytes, count), file_is_ours(file))
}
ssize_t writev(int file, const struct iovec *parts, int count) {
  CHANGE(ssize_t, writev, (int, const struct iovec *, int), real(file, parts, count),
         file_is_ours(file))
}
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
  CHANGE(ssize_t, pwritev, (int, const struct iovec *, int, off_t),
         real(file, parts, count, offset), file_is_ours(file))
}
/* Syncing changes nothing in the folder, so there is no copy before it. */
static void note_synced(int file) {
  char name[64], path[4096], command[4 * 4096];
  if (!recording || copying || !file_is_ours(file)) return;
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0) return;
  path[length] = 0;
  if (strstr(path, "/server.db") == NULL) return;
  pthread_mutex_lock(&one_at_a_time);
  copying = 1;
  snprintf(command, sizeof command, "cp -a '%s' '%s/synced'", path, copies);
  if (system(command) != 0) fprintf(stderr, "cannot copy %s\n", path);
  copying = 0;
  pthread_mutex_unlock(&one_at_a_time);
}
#define SYNC(name)                                                 \
  int name(int file) {                                             \
    static int (*real)(int);                                       \
    if (!real) real = dlsym(RTLD_NEXT, #name);                     \
    int answer = real(file);                                       \
    if (answer == 0) note_synced(file);                            \
    return answer;                                                 \
  }
SYNC(fsync)
SYNC(fdatasync)

int ftruncate(int file, off_t length) {
  CHANGE(int, ftruncate, (int, off_t), real(file, length), file_is_ours(file))
}
int ftruncate64(int file, off64_t length) {
  CHANGE(int, ftruncate64, (int, off64_t), real(file, length), file_is_ours(file))
}
int rename(const char *from, const char *to) {
  CHANGE(int, rename, (const char *, const char *), real(from, to), path_is_ours(AT_FDCWD, to))
}
int renameat(int at, const char *from, int there, const char *to) {
  CHANGE(int, renameat, (int, const char *, int, const char *), real(at, from, there, to),
         path_is_ours(there, to))
}
int unlink(const char *path) {
  CHANGE(int, unlink, (const char *), real(path), path_is_ours(AT_FDCWD, path))
}
int unlinkat(int at, const char *path, int flags) {
  CHANGE(int, unlinkat, (int, const char *, int), real(at, path, flags), path_is_ours(at, path))
}
int rmdir(const char *path) {
  CHANGE(int, rmdir, (const char *), real(path), path_is_ours(AT_FDCWD, path))
}
int mkdir(const char *path, mode_t mode) {
  CHANGE(int, mkdir, (const char *, mode_t), real(path, mode), path_is_ours(AT_FDCWD, path))
}

/* Opening changes the folder if it creates or empties a file. */
#define OPEN(name)                                                                          \
  int name(const char *path, int flags, ...) {                                              \
    va_list more;                                                                           \
    va_start(more, flags);                                                                  \
    mode_t mode = va_arg(more, mode_t);                                                     \
    va_end(more);                                                                           \
    CHANGE(int, name, (const char *, int, ...), real(path, flags, mode),                    \
           (flags & (O_CREAT | O_TRUNC)) && path_is_ours(AT_FDCWD, path))                   \
  }
#define OPENAT(name)                                                                        \
  int name(int at, const char *path, int flags, ...) {                                      \
    va_list more;                                                                           \
    va_start(more, flags);                                                                  \
    mode_t mode = va_arg(more, mode_t);                                                     \
    va_end(more);                                                                           \
    CHANGE(int, name, (int, const char *, int, ...), real(at, path, flags, mode),           \
           (flags & (O_CREAT | O_TRUNC)) && path_is_ours(at, path))                         \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
