"""Texts to token shards on disk: by many processes, in the order of the texts; a run that was stopped goes on."""

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from tqdm import tqdm
from tyro.conf import Positional, arg

from .directory import occupied, sync
from .indexed import PREPARED, PROGRESS, write_index
from .record import tell
from .sources import SUFFIXES, Block, Encoded, blocks, encode_block
from .text import Tokenizer, open_tokenizer, with_control
from .typed import ConfigError

RECORD_EVERY = 10.0  # seconds of work that a stop may lose


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the bytes of the shards."""

    inputs: tuple[tuple[str, int], ...]  # path and size of each
    tokenizer: str
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


def prepare(
    inputs: Annotated[Positional[tuple[Path, ...]], arg(metavar="INPUT...")],
    *,
    out: Path,
    tokenizer: str = "bytes",
    end: Annotated[str | None, arg(metavar="TOKEN")] = None,
    field: str = "text",
    workers: int = os.cpu_count() or 1,
    shard_tokens: int = 1 << 30,
    control_tokens: bool = False,
    skip_bad: bool = False,
) -> int:
    """Turn texts into token shards, which train.py reads with --data.path OUT. The same call again goes on.

    Args:
        inputs: .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt files, or directories of them
        out: the directory of shards, each a pair of files in Megatron's indexed format
        tokenizer: bytes, a tokenizer.json, or the directory of one
        end: the token that ends each document; that of the tokenizer's directory when absent
        field: what holds the text of a row
        workers: how many processes encode; the shards are the same for any number
        shard_tokens: how many tokens fill a shard; a document is never cut
        control_tokens: what reads like a control token in a text is one
        skip_bad: leave out rows that cannot be read, and tell how many, instead of stopping at the first
    """
    if workers < 1 or shard_tokens < 1:
        raise ConfigError(f"--workers ({workers}) and --shard-tokens ({shard_tokens}) must be at least 1")
    try:
        paths = files_of(inputs)
        opened = open_tokenizer(tokenizer, end)
        if opened.end is None:
            raise ValueError(f"{tokenizer}: nothing ends a document: set --end to a token of it")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    settings = Settings(
        inputs=tuple((str(path), path.stat().st_size) for path in paths),
        tokenizer=tokenizer,
        end=opened.end,
        size=opened.size,
        field=field,
        control_tokens=control_tokens,
        skip_bad=skip_bad,
        shard_tokens=shard_tokens,
    )
    with occupied(out, f"{out} is being written by another process: wait for its end, or name another place"):
        if done := finished(out, settings):
            tell(f"{out}: nothing left to do: {done['documents']:,} documents, {done['tokens']:,} tokens")
            return 0
        with (
            Shards(out, settings) as shards,
            tqdm(
                total=sum(size for _, size in settings.inputs), unit="B", unit_scale=True, disable=None, leave=False
            ) as bar,
        ):
            for encoded in in_order(skipped(settings, shards.state["blocks"]), settings, workers):
                for fault in encoded.bad:
                    tell(f"left out: {fault}")
                shards.add(encoded)
                bar.update(encoded.read)
            done = shards.close()
    left = f", {done['bad']:,} rows left out" if done["bad"] else ""
    tell(f"{out}: {done['documents']:,} documents, {done['tokens']:,} tokens, {done['shards']} shards{left}")
    return 0


def files_of(inputs: Sequence[Path]) -> list[Path]:
    """The files that are asked for, those of a directory by name."""
    found = []
    for path in inputs:
        inside = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: has no file of texts in it")
        found += inside
    for path in found:
        if not path.is_file():
            raise ValueError(f"{path}: is not there")
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path}: must end in one of {', '.join(SUFFIXES)}")
    return found


def finished(out: Path, settings: Settings) -> dict[str, Any] | None:
    """What a whole directory of shards holds; None if it is not whole. Raises ConfigError if it is of another call."""
    for name in (PREPARED, PROGRESS):
        if (out / name).is_file():
            held = json.loads((out / name).read_text())
            wanted = json.loads(json.dumps(asdict(settings)))
            if differ := [key for key, value in wanted.items() if held["settings"].get(key) != value]:
                raise ConfigError(f"{out} was begun with another {', '.join(differ)}: name another place")
            return held if name == PREPARED else None
    if any(not path.name.startswith(".") for path in out.iterdir()):
        raise ConfigError(f"{out} holds something else already: name another place")
    return None


def skipped(settings: Settings, count: int) -> Iterator[Block]:
    """The blocks of all inputs after the first `count`, which were written before."""
    every = (block for path, _ in settings.inputs for block in blocks(Path(path), settings.field))
    for number, block in enumerate(every):
        if number >= count:
            yield block


def in_order(items: Iterable[Block], settings: Settings, workers: int) -> Iterator[Encoded]:
    """The blocks, encoded by so many processes, each of which has at most two blocks before it."""
    if workers == 1:
        yield from (work(block, settings) for block in items)
        return
    context = multiprocessing.get_context("forkserver")  # of which each process is a copy, without threads
    context.set_forkserver_preload([__name__])
    pending: deque[Future[Encoded]] = deque()
    with ProcessPoolExecutor(workers, context, initializer=single) as pool:
        try:
            for block in items:
                pending.append(pool.submit(work, block, settings))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def single() -> None:
    """Keep a process of several from starting threads of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def work(block: Block, settings: Settings) -> Encoded:
    tokenizer = opened(settings.tokenizer, settings.end, settings.control_tokens)
    return encode_block(block, tokenizer, settings.kind, settings.field, settings.skip_bad)


@cache
def opened(name: str, end: int, control_tokens: bool) -> Tokenizer:
    found = open_tokenizer(name, end)
    return with_control(found) if control_tokens else found


class Shards:
    """The shards of a directory while they are written. What is on disk, and how far it goes, is recorded on the way.

    blocks: how many blocks are in it.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.settings = out, settings
        counts = ("blocks", "shards", "documents", "tokens", "bad", "open", "shard_tokens", "shard_documents")
        self.state: dict[str, Any] = dict.fromkeys(counts, 0)
        if (out / PROGRESS).is_file():
            held = json.loads((out / PROGRESS).read_text())
            self.state = {name: held[name] for name in counts}
        self.recorded = time.monotonic()

    @property
    def open(self) -> int:
        """How many tokens there are of a document that has not ended."""
        return self.state["open"]

    def __enter__(self) -> "Shards":
        if not self.state["blocks"]:
            self.write(PROGRESS)  # by which a run that is stopped at once is known
        self.open_files()
        return self

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
        if self.state["shard_tokens"] >= self.settings.shard_tokens and not rest:
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
    """A file to be written on after its first bytes."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file
