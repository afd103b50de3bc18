"""Documents as text, and text as tokens."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tokenizers

from .config import ModelConfig

LONGEST_LINE = 1 << 30  # bytes of a jsonl row, which is held in memory whole
PIECE = re.compile(r"(?s).{1,65536}(?= |\Z)|.{1,65536}")  # of a text, to be encoded at once


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Texts to token ids. encode: texts -> one array of ids each; size: all ids are below; end: ends a document."""

    encode: Callable[[list[str]], list[np.ndarray]]
    size: int
    end: int


BYTES = Tokenizer(encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], size=257, end=256)


def open_tokenizer(name: str, model: ModelConfig) -> Tokenizer:
    """`bytes` (ids 0-255, 256 ends a document) or a tokenizer.json, where the model's first `eos_token_id` does.

    Text stays text: what reads like a special token is encoded as its characters. ValueError for a file that cannot be
    read, and for ids that the model has no embedding for.
    """
    tokenizer = BYTES if name == "bytes" else read_tokenizer(name, model.eos_token_id)
    size, end, vocab = tokenizer.size, tokenizer.end, model.vocab_size
    if size > vocab:
        raise ValueError(f"data.tokenizer {name} has {size} tokens, so vocab_size ({vocab}) must be at least {size}")
    if not 0 <= end < vocab:
        raise ValueError(f"eos_token_id ({end}) ends each document: must be from 0 to vocab_size ({vocab}) - 1")
    return tokenizer


def read_tokenizer(path: str, ends: tuple[int, ...]) -> Tokenizer:
    """The `tokenizers` library's file, without the truncation, padding and special tokens that it may ask for."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: is not there: data.tokenizer must be 'bytes' or a tokenizer.json")
    try:
        own = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path}: data.tokenizer must be 'bytes' or a tokenizer.json ({error})") from error
    if not ends:
        raise ValueError(f"{path}: nothing ends a document: the model's config.json must have eos_token_id")
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True

    def encode(texts: list[str]) -> list[np.ndarray]:
        try:
            return [np.array(e.ids, np.int64) for e in own.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:
            raise ValueError(f"{path}: must be able to encode any text ({error}): give it an unknown token") from error

    return Tokenizer(encode=encode, size=max(own.get_vocab().values(), default=-1) + 1, end=ends[0])


def documents(path: Path | None, field: str) -> Iterator[str]:
    """The texts of a jsonl, the one text of a txt, or Python's help pages by name. A UTF-8 BOM is no part of a text."""
    if path is None:
        yield from (topics[name] for name in sorted(topics))
    elif path.suffix == ".jsonl":
        yield from read_jsonl(path, field)
    else:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        try:
            yield raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{path}:{line}: must be UTF-8 text ({error})") from error


def read_jsonl(path: Path, field: str) -> Iterator[str]:
    r"""The text of each row. Only \n ends a line; blank lines are skipped; the first bad row is a ValueError.

    A text is taken as it is, NUL and line ends included. A row may have LONGEST_LINE bytes.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line := line.rstrip(b" \t\r\n"):
                try:
                    text = read_row(line, field)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                yield text


def read_row(line: bytes, field: str) -> str:
    """The text of one row of a jsonl; ValueError says what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line is longer than {LONGEST_LINE} bytes: must be cut in several rows")
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"the line must be one JSON object in UTF-8 ({reason})") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line is a JSON {type(row).__name__}, must be an object")
    if field not in row:
        raise ValueError(f"the object has no {field!r}: must have one, or set data.field to one of {sorted(row)[:9]}")
    if not isinstance(text := row[field], str):
        raise ValueError(f"{field!r} is of type {type(text).__name__}, must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field!r} has half a surrogate pair, must be Unicode text ({error.reason})") from error
    return text


def encode(texts: Iterable[str], tokenizer: Tokenizer, dtype: type[np.integer]) -> np.ndarray:
    """All documents in one flat array, each ended by `tokenizer.end`; a text of no tokens leaves nothing.

    So that memory stays bounded, a text longer than 65536 characters is encoded in pieces, cut before spaces.
    """
    flat, begun = bytearray(), 0
    pieces = ((match[0], match.end() == len(text)) for text in texts for match in PIECE.finditer(text))
    while batch := list(islice(pieces, 64)):
        for (_, ends), ids in zip(batch, tokenizer.encode([piece for piece, _ in batch]), strict=True):
            flat += ids.astype(dtype).tobytes()
            if ends and len(flat) > begun:
                flat += dtype(tokenizer.end).tobytes()
                begun = len(flat)
    return np.frombuffer(flat, dtype)
