"""Samples of one length, in an order that only the seed and a sample's number decide.

Text is cut in windows; fixed batches are replayed as they stand. Every rank reads the whole of the data when a run
starts, so what is wrong with it is said before any training, by all ranks alike.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tokenizers
import torch
from safetensors.numpy import load_file
from torch import Tensor

from .config import ModelConfig
from .kernels.reference import IGNORE
from .settings import DataConfig

Batch = dict[str, Tensor]  # tokens, targets: int64 [b, s]
Rows = dict[str, np.ndarray]  # tokens, targets: int64 [s], or [b, s] for an array of indices

LONGEST_LINE = 1 << 30  # bytes of a jsonl row, which is held in memory whole
PIECE = re.compile(r"(?s).{1,65536}(?= |\Z)|.{1,65536}")  # of a text, to be encoded at once


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Texts to token ids. encode: texts -> one array of ids each; size: all ids are below; end: ends a document."""

    encode: Callable[[list[str]], list[np.ndarray]]
    size: int
    end: int


BYTES = Tokenizer(encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], size=257, end=256)


@dataclass(frozen=True, eq=False)
class Windows:
    """Text cut every `seq_len` tokens; each token but the first is a target once, in one window.

    The last window is filled up with token 0, and with targets that are ignored. tokens: [n], any integer type.
    """

    tokens: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int | np.ndarray) -> Rows:
        index = np.asarray(index)
        if np.any((index < 0) | (index >= len(self))):
            raise IndexError(f"window {index} must be from 0 to {len(self) - 1}")
        at = index[..., None] * self.seq_len + np.arange(self.seq_len + 1)
        window = self.tokens.take(at, mode="clip").astype(np.int64)
        beyond = at >= len(self.tokens)
        return {
            "tokens": np.where(beyond[..., :-1], 0, window[..., :-1]),
            "targets": np.where(beyond[..., 1:], IGNORE, window[..., 1:]),
        }


@dataclass(frozen=True, eq=False)
class Samples:
    """Fixed batches: tokens and targets [n, s], any integer type."""

    tokens: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | np.ndarray) -> Rows:
        return {"tokens": self.tokens[index].astype(np.int64), "targets": self.targets[index].astype(np.int64)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Data:
    """What a run trains on and what it is evaluated on (which may be empty).

    seed: of the order in which `train` is read; None reads it in file order. notices: what a user should be told.
    """

    train: Windows | Samples
    held_out: Windows | Samples
    seed: int | None
    notices: tuple[str, ...] = ()

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """Which samples of `train` stand at these ascending places of the run, counted over all epochs."""
        epochs, places = np.divmod(numbers, len(self.train))
        if self.seed is None:
            return places
        orders = [shuffled(len(self.train), self.seed, int(e))[places[epochs == e]] for e in np.unique(epochs)]
        return np.concatenate(orders)


@lru_cache(maxsize=1)
def shuffled(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. size - 1. It sorts raw bits, which NumPy promises not to change, unlike `permutation`."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size), kind="stable")


def micro_batches(data: Data, start: int, cfg: DataConfig, rank: int, ranks: int) -> list[Batch]:
    """Data rank `rank`'s part of the global batch that begins with sample number `start` of the run.

    The number of samples consumed is all there is to save: it decides every batch that follows. Each rank takes a
    contiguous block of the global batch, cut in micro batches [micro_batch, seq_len].
    """
    assert cfg.global_batch % (ranks * cfg.micro_batch) == 0
    share = cfg.global_batch // ranks
    rows = data.train[data.indices(np.arange(share) + start + rank * share)]
    tokens, targets = (torch.from_numpy(rows[name]).split(cfg.micro_batch) for name in ("tokens", "targets"))
    return [{"tokens": t, "targets": u} for t, u in zip(tokens, targets, strict=True)]


def held_out_batches(data: Data, cfg: DataConfig, rank: int, ranks: int) -> Iterator[Batch]:
    """Every held-out sample once over all data ranks, in batches [micro_batch, seq_len].

    All ranks get the same number of batches; the last are filled up with rows of token 0 that have no label.
    """
    size, rows = len(data.held_out), cfg.micro_batch
    for first in range(0, size, rows * ranks):
        at = np.arange(rows) + first + rank * rows
        held, missing = data.held_out[at[at < size]], int(np.sum(at >= size))
        fill = {"tokens": 0, "targets": IGNORE}
        yield {k: torch.from_numpy(np.pad(held[k], ((0, missing), (0, 0)), constant_values=fill[k])) for k in fill}


def open_data(cfg: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Read all of the data and check it.

    Text (`.jsonl`, `.txt`, or Python's own help pages) is shuffled anew in each epoch; `held_out` of its windows, the
    last, are kept apart: at least one, and never all. Fixed batches (`.safetensors`: `tokens` and `targets`
    [samples, seq_len]) are replayed in file order and hold nothing out, so that two programs can train on the same.

    Raises ValueError, naming file and line, for whatever could not be trained on.
    """
    path = None if cfg.path is None else Path(cfg.path)
    if path is not None:
        if not path.is_file():
            raise ValueError(f"{path}: {'is a directory' if path.is_dir() else 'not found'}: data.path must be a file")
        if path.suffix not in (".jsonl", ".txt", ".safetensors"):
            raise ValueError(f"{path}: data.path must end in .jsonl, .txt or .safetensors")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: is empty: data.path must be a file that holds data")
        if path.suffix == ".safetensors":
            return open_samples(path, cfg.seq_len, model.vocab_size)
    tokenizer = open_tokenizer(cfg.tokenizer, model)
    tokens = encode(documents(path, cfg.field), tokenizer, np.uint16 if model.vocab_size <= 1 << 16 else np.uint32)
    if len(tokens) <= cfg.seq_len:
        where = f"{path or 'the built-in text'}: has {len(tokens)} tokens"
        raise ValueError(f"{where}, must have at least data.seq-len ({cfg.seq_len}) + 1: set a smaller data.seq-len")
    windows = len(Windows(tokens, cfg.seq_len))
    held = min(max(round(cfg.held_out * windows), 1), windows - 1) if cfg.held_out else 0
    cut = (windows - held) * cfg.seq_len
    train, held_out = Windows(tokens[: cut + 1], cfg.seq_len), Windows(tokens[cut:], cfg.seq_len)
    notices = ("the text is one window: none is held out",) if cfg.held_out and not held else ()
    return Data(train=train, held_out=held_out, seed=seed, notices=notices)


def open_samples(path: Path, seq_len: int, vocab_size: int) -> Data:
    """Read fixed batches. Samples without any label count nothing in the loss; a notice says how many there are."""
    try:
        held = load_file(path)
    except Exception as error:  # the library's own errors do not name the file
        raise ValueError(f"{path}: must be a safetensors file of fixed batches ({error})") from error
    shapes = {ids.shape if ids.dtype.kind in "iu" and ids.ndim == 2 else None for ids in held.values()}
    if set(held) != {"tokens", "targets"} or len(shapes) > 1 or None in shapes:
        found = ", ".join(f"{name} {ids.dtype} {list(ids.shape)}" for name, ids in sorted(held.items()))
        raise ValueError(f"{path}: has {found or 'nothing'}, must have tokens and targets, integers [samples, seq_len]")
    tokens, targets = held["tokens"], held["targets"]
    if tokens.shape[1] != seq_len:
        raise ValueError(f"{path}: samples have {tokens.shape[1]} tokens, data.seq-len is {seq_len}: must be equal")
    for name, ids, allowed in (("tokens", tokens, 0), ("targets", targets, IGNORE)):
        wrong = ((ids < 0) | (ids >= vocab_size)) & (ids != allowed)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"{path}: {name}[{row}, {column}] is {ids[row, column]}, must be below the model's vocab_size "
                f"({vocab_size}) and not negative; ids reach {ids.max()}, and {IGNORE} marks a target without a label"
            )
    bare = int(np.sum((targets == IGNORE).all(axis=1)))
    if bare == len(targets):
        raise ValueError(f"{path}: no sample has a label: all targets of its {bare} samples are {IGNORE}")
    notices = (f"{path}: {bare} of {len(targets)} samples have no label",) if bare else ()
    return Data(train=Samples(tokens, targets), held_out=Samples(tokens[:0], targets[:0]), seed=None, notices=notices)


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
