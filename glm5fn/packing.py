"""Documents in windows of one length: cut where a window ends, or packed so that as few as can be are cut."""

from dataclasses import dataclass

import numpy as np

from .kernels.reference import IGNORE

Rows = dict[str, np.ndarray]  # tokens, targets, perhaps segments: int64 [s], or [b, s] for an array of indices
FILL = {"tokens": 0, "targets": IGNORE, "segments": 0}  # what stands where nothing is


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Documents one after the other.

    name: of the file, for messages. tokens: of all documents, any integer type [t]. begins: where each begins, and the
    end of the last [n + 1]. size: all ids must be below. learned: which tokens are labels [t]; all if None.
    """

    name: str
    tokens: np.ndarray
    begins: np.ndarray
    size: int
    learned: np.ndarray | None = None

    def read(self, at: np.ndarray | slice) -> np.ndarray:
        """The ids at these places. Raises ValueError for one that the model has no embedding for."""
        ids = self.tokens[at].astype(np.int64)
        if np.any(wrong := (ids < 0) | (ids >= self.size)):
            raise ValueError(f"{self.name}: has token {ids[wrong][0]}, must be from 0 to vocab_size ({self.size}) - 1")
        return ids

    def targets(self, at: np.ndarray | slice, ids: np.ndarray) -> np.ndarray:
        return ids if self.learned is None else np.where(self.learned[at], ids, IGNORE)


@dataclass(frozen=True, eq=False)
class Windows:
    """The text cut every `seq_len` tokens; each token but the first is a target once, in one window.

    The last window is filled up with token 0, and with targets that are ignored. apart: documents are kept apart, as
    segments, and no token is the target of another document's.
    """

    corpus: Corpus
    seq_len: int
    apart: bool = False

    def __len__(self) -> int:
        return max(-(-(len(self.corpus.tokens) - 1) // self.seq_len), 0)

    def __getitem__(self, index: int | np.ndarray) -> Rows:
        index = within(index, len(self))
        at = index[..., None] * self.seq_len + np.arange(self.seq_len + 1)
        beyond = at >= len(self.corpus.tokens)
        held = np.minimum(at, len(self.corpus.tokens) - 1)
        ids = self.corpus.read(held)
        targets = self.corpus.targets(held, ids)[..., 1:]
        found = {
            "tokens": np.where(beyond[..., :-1], FILL["tokens"], ids[..., :-1]),
            "targets": np.where(beyond[..., 1:], IGNORE, targets),
        }
        if not self.apart:
            return found
        documents = np.searchsorted(self.corpus.begins, held, side="right")
        seams = documents[..., 1:] != documents[..., :-1]
        numbers = documents[..., :-1] - documents[..., :1] + 1
        segments = np.where(beyond[..., :-1], FILL["segments"], numbers)
        return found | {"targets": np.where(seams, IGNORE, found["targets"]), "segments": segments}


@dataclass(frozen=True, eq=False)
class Packed:
    """Windows of whole documents; one that is longer than a window is cut into pieces of one.

    Each token but the first of its document is a target once. starts, sizes: of the pieces, in tokens that predict
    another; bounds: of which pieces each window is made [w + 1].
    """

    corpus: Corpus
    seq_len: int
    starts: np.ndarray
    sizes: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int | np.ndarray) -> Rows:
        index = within(index, len(self))
        found = {name: np.full((*index.shape, self.seq_len), fill, np.int64) for name, fill in FILL.items()}
        for place in np.ndindex(index.shape):
            at = 0
            pieces = range(self.bounds[index[place]], self.bounds[index[place] + 1])
            for number, piece in enumerate(pieces, 1):
                start, size = self.starts[piece], self.sizes[piece]
                ids, here = self.corpus.read(slice(start, start + size + 1)), (*place, slice(at, at + size))
                found["tokens"][here], found["segments"][here] = ids[:-1], number
                found["targets"][here] = self.corpus.targets(slice(start + 1, start + size + 1), ids[1:])
                at += size
        return found


def within(index: int | np.ndarray, size: int) -> np.ndarray:
    index = np.asarray(index)
    if np.any((index < 0) | (index >= size)):
        raise IndexError(f"window {index} must be from 0 to {size - 1}")
    return index


def pack(corpus: Corpus, seq_len: int) -> Packed:
    """Best fit, the longest piece first: each goes where the least room is left that holds it.

    The windows stand in the order of the documents with which they begin.
    """
    starts, sizes = pieces_of(corpus.begins, seq_len)
    window_of = np.empty(len(sizes), np.int64)
    open_windows: list[list[int]] = [[] for _ in range(seq_len + 1)]  # by the room that is left
    rooms = windows = 0  # rooms: bit r is set if a window has room for r
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            window = open_windows[room].pop()
            if not open_windows[room]:
                rooms &= ~(1 << room)
        else:
            room, window, windows = seq_len, windows, windows + 1
        window_of[piece] = window
        if left := room - size:
            open_windows[left].append(window)
            rooms |= 1 << left
    _, first = np.unique(window_of, return_index=True)  # the first piece of each window
    window_of = np.argsort(np.argsort(first, kind="stable"))[window_of]
    order = np.argsort(window_of, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(window_of, minlength=windows)))).astype(np.int64)
    return Packed(corpus, seq_len, starts[order], sizes[order], bounds)


def pieces_of(begins: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, how many tokens predict another) of the pieces of all documents; one of a single token has none."""
    pairs = np.maximum(np.diff(begins) - 1, 0)
    counts = -(-pairs // seq_len)
    document = np.repeat(np.arange(len(pairs)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[:-1][document] + number * seq_len
    return starts, np.minimum(seq_len, pairs[document] - number * seq_len)
