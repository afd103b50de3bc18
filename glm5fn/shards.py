"""Token shards on disk while they are written: a record says how far they go, and a run that was stopped goes on."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .directory import sync
from .indexed import PREPARED, PROGRESS, open_shard, write_index
from .sources import Encoded
from .typed import ConfigError

COUNTS = ("blocks", "shards", "documents", "tokens", "bad", "open", "shard_tokens", "shard_documents")
RECORD_EVERY = 10.0  # seconds of work that a stop may lose


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the bytes of the shards."""

    inputs: tuple[tuple[str, int, int], ...]  # path and size of each, and when it was written last
    tokenizer: str
    tokenizer_checksum: str
    end: int  # the id that ends a document
    size: int  # all ids are below
    field: str
    control_tokens: bool
    skip_bad: bool
    shard_tokens: int

    @property
    def kind(self) -> np.dtype:
        """Of the tokens; Megatron-LM has no unsigned type of four bytes."""
        return np.dtype("<u2" if self.size <= 1 << 16 else "<i4")


def finished(out: Path, settings: Settings) -> dict[str, Any] | None:
    """What a whole directory of shards holds; None if it is not whole. Raises ConfigError if it is of another call."""
    for name in (PREPARED, PROGRESS):
        if (out / name).is_file():
            held = read_record(out / name)
            wanted = json.loads(json.dumps(asdict(settings)))
            if differ := [key for key, value in wanted.items() if held["settings"].get(key) != value]:
                raise ConfigError(f"{out} was begun with another {', '.join(differ)}: name another place")
            if name == PROGRESS:
                return None
            (out / PROGRESS).unlink(missing_ok=True)  # which a kill can have left
            for shard in range(held["shards"]):
                open_shard(out / f"shard_{shard:05}")
            return held
    if any(not path.name.startswith(".") for path in out.iterdir()):
        raise ConfigError(f"{out} holds something else already: name another place")
    return None


def read_record(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text())
        return {**{name: int(held[name]) for name in COUNTS}, "settings": dict(held["settings"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}): remove {path.parent}, and begin anew") from error


class Shards:
    """The shards of a directory while they are written. What is on disk, and how far it goes, is recorded on the way.

    blocks: how many blocks are in it.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.settings = out, settings
        self.state: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        if (out / PROGRESS).is_file():
            held = read_record(out / PROGRESS)
            self.state = {name: held[name] for name in COUNTS}
        self.recorded = time.monotonic()

    @property
    def open(self) -> int:
        """How many tokens there are of a document that has not ended."""
        return self.state["open"]

    def __enter__(self) -> "Shards":
        if not self.state["blocks"]:
            self.write(PROGRESS)  # by which a run that is stopped at once is known
        for left in self.out.glob("*.lengths"):
            if left != self.path(".lengths"):
                left.unlink()
        self.open_files()
        if self.full:  # and it was stopped before it was ended
            self.finish()
        return self

    @property
    def full(self) -> bool:
        return self.state["shard_tokens"] >= self.settings.shard_tokens and not self.open

    def __exit__(self, *_: object) -> None:
        self.data.close()
        self.lengths.close()

    def path(self, suffix: str) -> Path:
        return self.out / f"shard_{self.state['shards']:05}{suffix}"

    def open_files(self) -> None:
        """Open the files of the shard at hand, without what was written after the last record."""
        self.data = reopened(self.path(".bin"), self.state["shard_tokens"] * self.settings.kind.itemsize)
        self.lengths = reopened(self.path(".lengths"), self.state["shard_documents"] * 4)

    def add(self, encoded: Encoded) -> None:
        """Write the documents of the next block; the last one may go on in the block that follows."""
        lengths = np.diff(encoded.ends, prepend=-self.open)
        if lengths.max(initial=0) > np.iinfo("<i4").max:
            raise ValueError(f"a document has {lengths.max()} tokens: cut it, the format counts to 2 ** 31 - 1")
        self.data.write(encoded.ids.tobytes())
        self.lengths.write(lengths.astype("<i4").tobytes())
        rest = len(encoded.ids) - (encoded.ends[-1] if len(encoded.ends) else -self.open)
        self.state["open"] = int(rest)
        for name, count in (("tokens", len(encoded.ids)), ("documents", len(lengths))):
            self.state[f"shard_{name}"] += count
            self.state[name] += count
        self.state["bad"] += len(encoded.bad)
        self.state["blocks"] += 1
        if self.full:
            self.finish()
        elif time.monotonic() - self.recorded > RECORD_EVERY:
            self.record()

    def record(self) -> None:
        """Put what is written on disk, and then how far it goes."""
        for file in (self.data, self.lengths):
            file.flush()
            sync(Path(file.name))
        self.write(PROGRESS)
        self.recorded = time.monotonic()

    def write(self, name: str) -> None:
        text = json.dumps({"settings": asdict(self.settings), **self.state}, indent=2) + "\n"
        temporary = self.out / f".{name}"
        temporary.write_text(text)
        sync(temporary)
        temporary.rename(self.out / name)
        sync(self.out)

    def finish(self) -> None:
        """End the shard at hand and begin another."""
        self.record()
        lengths = np.fromfile(self.path(".lengths"), "<i4")
        with self.path(".idx").open("wb") as file:
            write_index(file, self.settings.kind, lengths)
        sync(self.path(".idx"))
        self.data.close()
        self.lengths.close()
        old = self.path(".lengths")
        self.state |= {"shards": self.state["shards"] + 1, "shard_tokens": 0, "shard_documents": 0}
        self.open_files()
        self.record()
        old.unlink()

    def close(self) -> dict[str, Any]:
        """End the last shard; the directory is whole once this returns."""
        if self.state["shard_tokens"] or not self.state["shards"]:
            self.finish()
        for suffix in (".bin", ".lengths"):  # of a shard that has nothing
            self.path(suffix).unlink()
        self.write(PREPARED)
        (self.out / PROGRESS).unlink()
        return self.state


def reopened(path: Path, size: int) -> BinaryIO:
    """A file to be written on after its first bytes. Raises ValueError if it has fewer."""
    if path.exists() and path.stat().st_size < size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, {size} were written: remove it all, and begin anew")
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file
