"""The files of one checkpoint, as Orbax writes and reads them. Nothing else in jaxmux uses Orbax.

This module works around the following behaviour of Orbax. tests/runs/test_orbax_files.py shows each
case, and fails if another version of Orbax behaves differently:

- `CheckpointManager` and `AsyncCheckpointer` start threads that outlive them, and raise an error
  again when they are closed. The threads of the plain `Checkpointer` end with the call, or shortly
  after it, because closing an event loop does not wait for its threads.
- If one of many arrays cannot be read or written, Orbax closes its event loop while TensorStore
  still works on the others. For each of these, "Event loop is closed" is printed with a traceback.
  `_array_handler` waits for all arrays before it raises the error of one.
- Orbax logs the traceback of every failing thread, although it also raises the error, and warns of
  missing files that it does not need. `_orbax` adds a filter that drops Orbax's log.
- A failed write leaves an unfinished folder behind. `remove_unfinished` deletes it.
"""

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmux.errors import first_line
from jaxmux.peft import SlotArrays

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# Names of the items of a checkpoint.
_RUN, _TASKS = "run", "tasks"
# Part of the names of unfinished checkpoints.
_UNFINISHED = ".orbax-checkpoint-tmp"


def write(folder: Path, record: Mapping[str, Any], arrays: Mapping[str, SlotArrays]) -> None:
    """Writes a checkpoint: `record`, a JSON object, and `arrays`, by task name the NumPy arrays by
    path. `folder` must not exist; it gets its name when the checkpoint is complete. Raises OSError
    if writing fails, for example because the disk is full; the files are then deleted."""
    args = _orbax().args
    items: dict[str, Any] = {_RUN: args.JsonSave(record)}
    if arrays:
        items[_TASKS] = args.PyTreeSave(arrays)
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder, args=args.Composite(**items))
    except (OSError, ValueError) as e:
        raise _os_error(e, folder) from None
    finally:
        remove_unfinished(folder.parent)


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of the checkpoint in a folder. If the record is damaged, the type of the
    exception varies, because Orbax passes on errors of many libraries."""
    return _read(folder, **{_RUN: _orbax().args.JsonRestore()})[_RUN]


def read_arrays(folder: Path, paths: Mapping[str, Iterable[str]]) -> dict[str, SlotArrays]:
    """Reads the arrays at `paths` (by task name) of the checkpoint in a folder, and nothing else.
    Returns NumPy arrays by name and path. If they are damaged, the type of the exception varies,
    because Orbax passes on errors of many libraries."""
    # Orbax takes the types from this example but not the shapes, so it accepts arrays of any shape.
    any_array = np.zeros(())
    item = {name: dict.fromkeys(of_task, any_array) for name, of_task in paths.items()}
    restore = _orbax().args.PyTreeRestore(item=item, partial_restore=True)
    return _read(folder, **{_TASKS: restore})[_TASKS]


def numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder, ascending. They are the names of its
    subfolders."""
    with os.scandir(folder) as entries:
        return sorted(int(e.name) for e in entries if _is_number(e.name) and e.is_dir())


def delete(folder: Path) -> None:
    """Deletes a checkpoint. If it is interrupted, an unfinished checkpoint remains."""
    condemned = folder.with_name(f"{folder.name}{_UNFINISHED}-deleted")
    shutil.rmtree(condemned, ignore_errors=True)
    folder.rename(condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Deletes the remains of unfinished checkpoints in this folder of checkpoints. No checkpoint
    may be in progress."""
    for path in folder.glob(f"*{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def reason(error: Exception) -> str:
    """One line with the reason why Orbax could not read a checkpoint, without TensorStore's long
    specifications."""
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return first_line(error).partition(" [tensorstore_spec")[0][:200]


def _os_error(error: OSError | ValueError, folder: Path) -> OSError:
    """The error of a failed write, with its system error number. TensorStore raises ValueError,
    which only quotes the number's text."""
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, os.strerror(error.errno), str(folder))
    text = str(error)
    quoted = [code for code in errno.errorcode if os.strerror(code) in text]
    if quoted:
        return OSError(quoted[0], os.strerror(quoted[0]), str(folder))
    return OSError(errno.EIO, reason(error), str(folder))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _read(folder: Path, **items: Any) -> Mapping[str, Any]:
    with _checkpointer() as checkpointer:
        return checkpointer.restore(folder, args=_orbax().args.Composite(**items))


def _checkpointer() -> "ocp.Checkpointer":
    ocp = _orbax()
    # Only process 0 calls Orbax, so Orbax must not wait for the other processes.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxmux"
    )
    types = ocp.type_handlers.create_type_handler_registry((np.ndarray, _array_handler()))
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        **{
            _RUN: ocp.JsonCheckpointHandler(multiprocessing_options=alone),
            _TASKS: ocp.PyTreeCheckpointHandler(
                multiprocessing_options=alone, type_handler_registry=types
            ),
        },
    )
    return ocp.Checkpointer(composite, multiprocessing_options=alone)


def _array_handler() -> "ocp.type_handlers.NumpyHandler":
    """A handler that reads and writes NumPy arrays during one call of a checkpointer. If an array
    fails, it raises the error only after all other arrays are done."""
    handler = _orbax().type_handlers.NumpyHandler

    class Handler(handler):
        def __init__(self):
            super().__init__()
            # Number of arrays being written, and an event that is set when the number falls to 0.
            self._writing, self._is_done = 0, asyncio.Event()

        async def deserialize(self, infos, args=None):
            read = super().deserialize
            reads = (
                read([info], None if args is None else [args[i]]) for i, info in enumerate(infos)
            )
            results = await asyncio.gather(*reads, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return [array for (array,) in results]

        async def _open_and_write(self, *args, **keywords):
            self._writing += 1
            # Let the writes of the other arrays begin too, so that they are counted.
            await asyncio.sleep(0)
            try:
                await super()._open_and_write(*args, **keywords)
            except Exception:
                self._note_end()
                await self._is_done.wait()
                raise
            self._note_end()

        def _note_end(self):
            self._writing -= 1
            if not self._writing:
                self._is_done.set()

    return Handler()


@cache
def _orbax() -> ModuleType:
    """The package `orbax.checkpoint`, imported on first use because the import is slow."""
    import orbax.checkpoint

    package = f"{Path(orbax.checkpoint.__file__).parent}{os.sep}"
    logging.getLogger("absl").addFilter(lambda record: not record.pathname.startswith(package))
    return orbax.checkpoint
