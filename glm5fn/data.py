"""Samples of one length, in an order that only the seed and a sample's number decide."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .packing import FILL, Packed, Rows, Windows
from .settings import DataConfig

Batch = dict[str, Tensor]  # tokens, targets, perhaps segments: int64 [b, s]
PATTERN = 10000  # samples after which the order of weighted corpora repeats


@dataclass(frozen=True, eq=False)
class Samples:
    """Fixed batches: tokens and targets [n, s], any integer type."""

    tokens: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | np.ndarray) -> Rows:
        return {"tokens": self.tokens[index].astype(np.int64), "targets": self.targets[index].astype(np.int64)}


@dataclass(frozen=True, eq=False)
class Part:
    """`size` of the samples of a set, from number `first` on."""

    whole: Windows | Packed
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: np.ndarray) -> Rows:
        return self.whole[index + self.first]


@dataclass(frozen=True, eq=False)
class Joined:
    """Sets of samples one after the other."""

    sets: Sequence[Part]

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def __getitem__(self, index: np.ndarray) -> Rows:
        ends = np.cumsum([len(part) for part in self.sets])
        which = np.searchsorted(ends, index, side="right")
        begins = np.concatenate(([0], ends[:-1]))
        return gather(self.sets, which, index - begins[which])


Set = Samples | Part | Joined


def gather(sets: Sequence[Set], which: np.ndarray, index: np.ndarray) -> Rows:
    """Samples of several sets; those of a set without segments are one document each."""
    found: Rows = {}
    for n in np.unique(which):
        here = which == n
        for name, values in sets[n][index[here]].items():
            found.setdefault(name, np.ones((len(which), values.shape[1]), np.int64))[here] = values
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Data:
    """What a run trains on and what it is evaluated on (which may be empty).

    train: sets, each of which is read over and over. order: of which set the samples are, over and over. seed: of the
    order in which a set is read, anew each time; None reads it in file order. notices: what a user should be told.
    """

    train: Sequence[Set]
    held_out: Set
    seed: int | None
    order: Sequence[int] = (0,)
    notices: tuple[str, ...] = ()
    orders: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, init=False)

    def rows(self, numbers: np.ndarray) -> Rows:
        """The samples that stand at these places of the run."""
        which, index = self.places(numbers)
        return gather(self.train, which, index)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(of which set each of these samples of the run is, and which of that set)."""
        order = np.array(self.order)
        rounds, at = np.divmod(numbers, len(order))
        which, index = order[at], np.empty(len(numbers), np.int64)
        for n in np.unique(which):
            mine, here = order == n, which == n
            taken = rounds[here] * mine.sum() + (np.cumsum(mine) - 1)[at[here]]  # samples of the set before this
            index[here] = self.shuffled(int(n), taken)
        return which, index

    def shuffled(self, n: int, taken: np.ndarray) -> np.ndarray:
        size = len(self.train[n])
        epochs, index = np.divmod(taken, size)
        if self.seed is not None:
            for epoch in np.unique(epochs):
                index[epochs == epoch] = self.order_in(n, int(epoch))[index[epochs == epoch]]
        return index

    def order_in(self, n: int, epoch: int) -> np.ndarray:
        """In which order a set is read in an epoch. Those of its last two epochs are kept."""
        assert self.seed is not None
        if (n, epoch) not in self.orders:
            for older in [key for key in self.orders if key[0] == n and abs(key[1] - epoch) > 1]:
                del self.orders[older]
            self.orders[n, epoch] = permutation(len(self.train[n]), self.seed, epoch, n)
        return self.orders[n, epoch]


def permutation(size: int, seed: int, epoch: int, n: int) -> np.ndarray:
    """Of 0 .. size - 1. It sorts raw bits, which NumPy promises not to change, unlike its own `permutation`."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence((seed, epoch, n))).random_raw(size), kind="stable")


def spread(weights: Sequence[float]) -> Sequence[int]:
    """Of which set each of PATTERN samples is, as evenly as can be."""
    shares = np.array(weights) / np.sum(weights) * PATTERN
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: PATTERN - counts.sum()]] += 1
    due = [(np.arange(count) + 0.5) / count for count in counts]
    which = np.repeat(np.arange(len(counts)), counts)
    return which[np.argsort(np.concatenate(due), kind="stable")].tolist()


def micro_batches(data: Data, cfg: DataConfig, rank: int, ranks: int, start: int) -> list[Batch]:
    """Data rank `rank`'s part of the global batch that begins with sample number `start` of the run.

    The number of samples consumed is all there is to save: it decides every batch that follows. Each rank takes a
    contiguous block of the global batch, cut in micro batches [micro_batch, seq_len].
    """
    assert cfg.global_batch % (ranks * cfg.micro_batch) == 0
    share = cfg.global_batch // ranks
    rows = data.rows(np.arange(share) + start + rank * share)
    parts = {name: torch.from_numpy(values).split(cfg.micro_batch) for name, values in rows.items()}
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def held_out_batches(data: Data, cfg: DataConfig, rank: int, ranks: int) -> Iterator[Batch]:
    """Every held-out sample once over all data ranks, in batches [micro_batch, seq_len].

    All ranks get the same number of batches; the last are filled up with rows of token 0 that have no label.
    """
    size, rows = len(data.held_out), cfg.micro_batch
    for first in range(0, size, rows * ranks):
        at = np.arange(rows) + first + rank * rows
        held, beyond = data.held_out[np.minimum(at, size - 1)], at >= size
        yield {name: torch.from_numpy(np.where(beyond[:, None], FILL[name], part)) for name, part in held.items()}
