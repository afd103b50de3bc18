"""Directories that appear whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SUBDIRECTORIES = ("additional_chat_templates", "arrays")  # what a model's directory, or a checkpoint, may have


@contextmanager
def atomic_directory(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary directory that takes the place of `path`, whole and on disk, once the block ends.

    An exception removes it and leaves `path` as it was. A kill leaves at most names that begin with a dot, which the
    next writer to `path` clears away; see `settle`. Raises ValueError, before any work, if `path` exists and may not
    be overwritten, is something else than a directory of tensor files, or is being written by another process.
    """
    target = Path(path).resolve()
    temporary = aside(target, "partial")
    with occupied(temporary, f"{path} is being written by another process: wait for its end, or name another place"):
        try:
            settle(target)
            refuse(target, overwrite)
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
            for written in (*temporary.rglob("*"), temporary):
                sync(written)
            if overwrite and target.exists():
                target.rename(aside(target, "replaced"))
            temporary.rename(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            settle(target)


def refuse(target: Path, overwrite: bool) -> None:
    """Raise ValueError for what is there and may not, or should not, be overwritten."""
    if not target.exists():
        return
    if not overwrite:
        raise ValueError(f"{target} exists already: name another place, or allow it to be overwritten")
    found = [*target.iterdir()] if target.is_dir() else []
    foreign = [path.name for path in found if path.is_dir() and path.name not in SUBDIRECTORIES]
    tensors = any(path.suffix == ".safetensors" or path.stem == "arrays" for path in found)
    if not target.is_dir() or foreign or (found and not tensors):
        why = f": it has {', '.join(foreign)}" if foreign else ""
        raise ValueError(
            f"{target} is not a directory of safetensors files, so it is not overwritten{why}: name another"
        )


@contextmanager
def occupied(path: Path, taken: str) -> Iterator[None]:
    """Make a directory, and keep it from all other processes that ask, until the block or this process ends.

    Raises ValueError(taken) if another has it.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # the one that had it has just renamed it
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                yield
                return
        except BlockingIOError as error:
            raise ValueError(taken) from error
        finally:
            os.close(handle)


def settle(path: Path) -> None:
    """Finish what a killed overwrite of `path` left undone: drop the old directory, or put it back if none is there."""
    old = aside(path, "replaced")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def aside(path: Path, why: str) -> Path:
    return path.parent / f".{path.name}.{why}"


def sync(path: Path) -> None:
    """Wait until a file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_file(path: Path, flag: str) -> None:
    """Raise ValueError, before any work, for the place of a file that cannot be written to."""
    try:
        if path.is_dir():
            raise OSError("it is a directory")
        TemporaryDirectory(dir=path.parent).cleanup()
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written to ({error}): name another place") from error
