"""Samples of one length, in an order that only the seed and a sample's number decide.

Text is cut in windows; fixed batches are replayed as they stand. Every rank reads the whole of the data when a run
starts, so what is wrong with it is said before any training, by all ranks alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from .config import ModelConfig
from .kernels.reference import IGNORE
from .settings import DataConfig
from .text import documents, encode, open_tokenizer

SUFFIXES = (".jsonl", ".txt", ".safetensors")

Batch = dict[str, Tensor]  # tokens, targets: int64 [b, s]
Rows = dict[str, np.ndarray]  # tokens, targets: int64 [s], or [b, s] for an array of indices


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


def source(cfg: DataConfig) -> Path | None:
    """The file that is read; None for the text that ships with Python. Raises ValueError if it cannot be one."""
    if cfg.path is None:
        return None
    path = Path(cfg.path)
    if not path.is_file():
        raise ValueError(f"{path}: {'is a directory' if path.is_dir() else 'is not there'}: data.path must be a file")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: data.path must end in one of {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty: data.path must be a file that holds data")
    return path


def open_data(cfg: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Read all of the data and check it.

    Text (`.jsonl`, `.txt`, or Python's own help pages) is shuffled anew in each epoch; `held_out` of its windows, the
    last, are kept apart: at least one, and never all. Fixed batches (`.safetensors`: `tokens` and `targets`
    [samples, seq_len]) are replayed in file order and hold nothing out, so that two programs can train on the same.

    Raises ValueError, naming file and line, for whatever could not be trained on.
    """
    path = source(cfg)
    if path is not None and path.suffix == ".safetensors":
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
