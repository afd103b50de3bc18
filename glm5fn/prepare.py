"""Texts to token shards on disk: by many processes, in the order of the texts; a run that was stopped goes on."""

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Annotated

import xxhash
from tqdm import tqdm
from tyro.conf import Positional, arg

from .directory import occupied
from .record import tell
from .shards import Settings, Shards, finished
from .sources import SUFFIXES, Block, Encoded, blocks, encode_block
from .text import open_tokenizer, tokenizer_file
from .typed import ConfigError


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
        if tokenizer == "bytes" and end is not None:
            raise ValueError(f"--end {end}: bytes have an end of their own: leave it out, or set --tokenizer")
        if opened.end is None:
            raise ValueError(f"{tokenizer}: nothing ends a document: set --end to a token of it")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    settings = Settings(
        inputs=tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths),
        tokenizer=tokenizer if tokenizer == "bytes" else str(Path(tokenizer).resolve()),
        tokenizer_checksum=""
        if tokenizer == "bytes"
        else xxhash.xxh3_128_hexdigest(tokenizer_file(tokenizer).read_bytes()),
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
                total=sum(size for _, size, _ in settings.inputs), unit="B", unit_scale=True, disable=None, leave=False
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


def skipped(settings: Settings, count: int) -> Iterator[Block]:
    """The blocks of all inputs after the first `count`, which were written before."""
    every = (block for path, *_ in settings.inputs for block in blocks(Path(path), settings.field))
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
    with ProcessPoolExecutor(workers, context, initializer=single, initargs=(os.getpid(),)) as pool:
        try:
            for block in items:
                pending.append(pool.submit(work, block, settings))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            why = "was it out of memory? The same call goes on; fewer --workers take less"
            raise ValueError(f"a process that encodes texts was killed: {why}") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def single(parent: int) -> None:
    """Keep a process of several from starting threads of its own, and from staying when the first one is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def watch() -> None:
        while Path(f"/proc/{parent}").exists() or not Path("/proc").exists():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(block: Block, settings: Settings) -> Encoded:
    tokenizer = opened(settings.tokenizer, settings.end, settings.control_tokens)
    return encode_block(block, tokenizer, settings.kind, settings.field, settings.skip_bad)


opened = cache(open_tokenizer)  # once in each process
