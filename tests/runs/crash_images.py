"""What a crash may leave of a server's folder."""

import shutil
from pathlib import Path
from random import Random


def copy_now(folder: Path, image: Path) -> Path:
    """Copies a folder as it is now, though others may write into it: if a file vanishes meanwhile,
    it is copied once more.

    Args:
      folder: the folder.
      image: the copy, which does not exist yet.
    """
    for _ in range(20):
        try:
            return Path(shutil.copytree(folder, image))
        except shutil.Error:
            shutil.rmtree(image)
    raise AssertionError(f"{folder} changes whenever it is copied")


def torn(random: Random, path: Path, least: int = 0) -> None:
    """Cuts a file off somewhere, or fills what was not written with zeros, as file systems do.

    Args:
      random: source of random numbers.
      path: the file.
      least: number of bytes that are kept.
    """
    content = path.read_bytes()
    kept = random.randint(least, len(content))
    zeros = random.choice((0, len(content) - kept))
    path.write_bytes(content[:kept] + bytes(zeros))


def flip(random: Random, path: Path) -> None:
    """Flips a bit of a file that is not empty.

    Args:
      random: source of random numbers.
      path: the file.
    """
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def checkpoint_numbers(folder: Path) -> list[int]:
    """Numbers of the complete checkpoints in a server's folder, ascending.

    Args:
      folder: the folder of the server.
    """
    names = (path.name for path in (folder / "checkpoints").iterdir())
    return sorted(int(name) for name in names if name.isdigit())


def reorder_writes(random: Random, checkpoint: Path) -> None:
    """Loses or damages some of a checkpoint's files, as if they had been written after its name.

    Args:
      random: source of random numbers.
      checkpoint: folder of the checkpoint.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in random.sample(files, random.randint(1, len(files))):
        match random.choice(("lost", "torn", "flipped")):
            case "lost":
                path.unlink()
            case "torn":
                torn(random, path)
            case "flipped" if path.stat().st_size:
                flip(random, path)


def leave_unfinished_checkpoint(random: Random, checkpoints: Path, number: int) -> None:
    """Adds a checkpoint that was being written, with any part of its files.

    Args:
      random: source of random numbers.
      checkpoints: the folder of the checkpoints.
      number: number of the checkpoint that is written.
    """
    unfinished = checkpoints / f"{number}.orbax-checkpoint-tmp"
    if unfinished.exists():
        return
    complete = [path for path in checkpoints.iterdir() if path.name.isdigit()]
    if complete and random.random() < 0.8:
        shutil.copytree(random.choice(sorted(complete)), unfinished)
        reorder_writes(random, unfinished)
    else:
        unfinished.mkdir()


def lose_power(random: Random, image: Path, folder: Path, unsynced) -> None:
    """Destroys what a server had not synced when it ended, in a copy of its folder. Checkpoints and
    events are left out, because others damage them.

    Args:
      random: source of random numbers.
      image: the copy.
      folder: the folder of the server.
      unsynced: the result of `SimulatedDisk.unsynced` for `folder`.
    """
    contents, entries = unsynced
    for path in sorted({*contents, *entries}):
        inside = path.relative_to(folder)
        copy = image / inside
        others = inside.parts[0] in ("checkpoints", ".lock") or inside.match("events.*jsonl")
        if others or not copy.exists():
            continue
        if random.random() < 0.5:
            continue
        if path in entries:
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
        else:
            torn(random, copy, contents[path])
