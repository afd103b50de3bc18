"""Files of texts, read in blocks of rows that depend on nothing but the file, and encoded block by block."""

import codecs
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np

from .text import Tokenizer, encode

T = TypeVar("T")

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ROWS = (*LINES, ".parquet")
SUFFIXES = (*ROWS, ".txt")
SIZE = 1 << 20  # bytes or characters of a block, and one row at least
LONGEST_LINE = 1 << 30  # bytes of a jsonl row, which is held in memory whole


class Block(NamedTuple):
    """rows: of a file, from number `first` on: lines of JSON, texts, or the next piece of one text, perhaps its last.

    read: how many bytes of the file were read for it.
    """

    path: Path
    first: int
    rows: Sequence[Any]
    kind: Literal["lines", "texts", "piece", "last piece"]
    read: int


class Encoded(NamedTuple):
    """ids: of a block. ends: where in them documents end. bad: what was left out, and why. read: as of the block."""

    ids: np.ndarray
    ends: np.ndarray
    bad: list[str]
    read: int


def blocks(path: Path, field: str) -> Iterator[Block]:
    """The rows of a file. Raises ValueError that names the file, and where it can the row, for what cannot be read."""
    if path.suffix == ".parquet":
        yield from parquet_blocks(path, field)
    elif path.suffix == ".txt":
        yield from text_blocks(path)
    else:
        yield from line_blocks(path)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the file as it is on disk, what it holds when unpacked)."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            yield raw, io.BufferedReader(gzip.GzipFile(fileobj=raw))  # pyright: ignore[reportArgumentType]
        elif path.suffix == ".zst":
            yield raw, io.BufferedReader(library("pyarrow", path).CompressedInputStream(raw, "zstd"))
        else:
            yield raw, raw


def library(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{path}: needs the {name.partition('.')[0]} package: install glm5fn[data]") from error


def line_blocks(path: Path) -> Iterator[Block]:
    r"""Only \n ends a line; blank lines count and have no row. A BOM at the start is no part of the first."""
    with unpacked(path) as (raw, file):
        rows, size, first, at = [], 0, 1, 0
        for number, line in enumerate(lines_of(file, path), 1):
            rows.append(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            size += len(line)
            if size >= SIZE:
                yield Block(path, first, rows, "lines", raw.tell() - at)
                rows, size, first, at = [], 0, number + 1, raw.tell()
        if rows:
            yield Block(path, first, rows, "lines", raw.tell() - at)


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Of a line that is too long, the beginning alone."""
    try:
        while line := file.readline(LONGEST_LINE + 1):
            yield line
            while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE + 1)
    except Exception as error:  # each library of packed files has its own
        raise ValueError(f"{path}: cannot be unpacked ({error}): is it whole?") from error


def text_blocks(path: Path) -> Iterator[Block]:
    """One document, in pieces that are cut before a space where there is one."""
    line, rest, begun, some = 1, "", False, False
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while raw := file.read(SIZE):
            text = decoded(decoder, raw, False, path, line)
            rest += text if begun else text.removeprefix("\ufeff")
            begun = begun or bool(text)
            line += raw.count(b"\n")
            space = rest.rfind(" ", 1)
            cut = space if space > 0 else len(rest)
            piece, rest = rest[:cut], rest[cut:]
            if piece:
                yield Block(path, 1, [piece], "piece", len(raw))
                some = True
    rest += decoded(decoder, b"", True, path, line)
    if rest or some:  # a file without text is no document
        yield Block(path, 1, [rest], "last piece", 0)


def decoded(decoder: codecs.IncrementalDecoder, raw: bytes, final: bool, path: Path, line: int) -> str:
    try:
        return decoder.decode(raw, final=final)
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: must be UTF-8 text ({error.reason})") from error


def parquet_blocks(path: Path, field: str) -> Iterator[Block]:
    parquet = library("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            total, count = path.stat().st_size, file.metadata.num_rows
            if field not in file.schema_arrow.names:
                raise ValueError(
                    f"has no column {field!r}, has {', '.join(file.schema_arrow.names)}: name another field"
                )
            first = 1
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                rows = texts_of(batch.column(0))
                yield Block(path, first, rows, "texts", total * len(rows) // max(count, 1))
                first += len(rows)
    except (ValueError, OSError) as error:  # pyarrow's own are among them
        raise ValueError(f"{path}: cannot be read ({error})") from error


def texts_of(column: Any) -> list[Any]:
    """The values of a column; of one that claims to be text and is not, the bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [text_or_bytes(getattr(value, "value", value)) for value in column]


def text_or_bytes(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()


def broken(text: bytes) -> str | None:
    """Why bytes are no UTF-8; None if they are."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason
    return None


def encode_block(block: Block, tokenizer: Tokenizer, kind: np.dtype, field: str, skip_bad: bool) -> Encoded:
    """The tokens of a block's documents, each ended by the tokenizer's end. A document of no tokens leaves nothing."""
    if block.kind in ("piece", "last piece"):
        if block.kind == "piece" and not tokenizer.joins:
            limit = f"a .txt longer than {SIZE} bytes must be cut, as rows of a .jsonl"
            raise ValueError(f"{block.path}: this tokenizer begins each part of a text with a space, so {limit}")
        ids, _ = encode(block.rows, tokenizer, kind, whole=False)
        if block.kind == "piece":
            return Encoded(ids, np.zeros(0, np.int64), [], block.read)
        ids = np.append(ids, kind.type(tokenizer.end))
        return Encoded(ids, np.array([len(ids)]), [], block.read)

    def read(row: Any) -> str:
        return checked(row, field) if block.kind == "texts" else text_of(read_object(row), field)

    texts, bad = read_rows(block, read, skip_bad)
    ids, ends = encode(texts, tokenizer, kind)
    return Encoded(ids, ends, bad, block.read)


def read_rows(block: Block, read: Callable[[Any], T], skip_bad: bool) -> tuple[list[T], list[str]]:
    """(what `read` makes of the rows of a block, what is wrong with those that it refuses). Blank lines are no rows.

    Raises ValueError for the first that it refuses, with the file and the number of the row, unless they are skipped.
    """
    found, bad = [], []
    for number, row in enumerate(block.rows, block.first):
        row = row.rstrip(b" \t\r\n") if block.kind == "lines" else row
        if row == b"":
            continue
        try:
            found.append(read(row))
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            bad.append(f"{block.path}:{number}: {why}")
            if not skip_bad:
                raise ValueError(bad[-1]) from error
    return found, bad


def placed_rows(path: Path, read: Callable[[Any], T]) -> Iterator[tuple[str, T]]:
    """(file and number, what `read` makes of it) of each row of a file of lines; errors as in `read_rows`."""
    for block in blocks(path, ""):
        for number, row in enumerate(block.rows, block.first):
            found, _ = read_rows(block._replace(first=number, rows=[row]), read, skip_bad=False)
            yield from ((f"{path}:{number}", each) for each in found)


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line; ValueError says what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE} bytes: must be cut in several rows")
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"the line must be one JSON object in UTF-8 ({reason})") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line is a JSON {type(row).__name__}, must be an object")
    return row


def text_of(row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise ValueError(f"the object has no {field!r}: must have one, or the field must be one of {sorted(row)[:9]}")
    return checked(row[field], field)


def checked(text: Any, field: str) -> str:
    """A text that can be encoded. It is taken as it is, NUL and line ends included."""
    if isinstance(text, bytes) and (reason := broken(text)):
        raise ValueError(f"{field!r} must be UTF-8 ({reason})")
    if not isinstance(text, str):
        raise ValueError(f"{field!r} is of type {type(text).__name__}, must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field!r} has half a surrogate pair, must be Unicode text ({error.reason})") from error
    return text
