"""Documents as token ids on disk, memory-mapped: Megatron-LM's indexed format, PREFIX.bin beside PREFIX.idx.

The .bin holds the tokens of all documents, one after the other. The .idx holds, little-endian: the nine bytes MAGIC,
a version (uint64, 1), the code of the tokens' type (uint8), how many sequences there are and how many entries the list
of documents has (uint64 each); then each sequence's length (int32) and the byte at which it begins (int64), and the
number of the sequence with which each document begins, and that of all sequences (int64).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

PREPARED, PROGRESS = "prepared.json", "progress.json"  # beside shards that `prepare` made, or makes

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in TYPES.items()}
HEAD = np.dtype([("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])


class Shard(NamedTuple):
    """tokens: of all documents [t]. begins: where each begins, and the end of the last [n + 1]."""

    tokens: np.ndarray
    begins: np.ndarray


def open_shard(prefix: Path) -> Shard:
    """Map a pair of files. Raises ValueError that names the file and what is wrong with it."""
    index, data = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(f"{path}: is not there: an indexed data set is a pair of PREFIX.bin and PREFIX.idx")
    with index.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{index}: is not an index of Megatron's: must begin with {MAGIC!r}")
        head = np.fromfile(file, HEAD, 1)
        if not len(head) or head["version"][0] != VERSION or int(head["code"][0]) not in TYPES:
            known = ", ".join(f"{code} ({np.dtype(kind)})" for code, kind in TYPES.items())
            raise ValueError(f"{index}: must be of version {VERSION}, with tokens of type {known}; has {head.tolist()}")
        kind, sequences = np.dtype(TYPES[int(head["code"][0])]), int(head["sequences"][0])
        listed, size = int(head["documents"][0]), index.stat().st_size
        if size != (must := len(MAGIC) + HEAD.itemsize + 12 * sequences + 8 * listed):
            raise ValueError(f"{index}: has {size} bytes, must have {must} for its {sequences} sequences: is it whole?")
        lengths, starts = np.fromfile(file, "<i4", sequences), np.fromfile(file, "<i8", sequences)
        first = np.fromfile(file, "<i8", listed)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    size = data.stat().st_size
    if not np.array_equal(starts, ends[:-1] * kind.itemsize) or ends[-1] * kind.itemsize != size:
        raise ValueError(f"{index}: its sequences must follow each other and fill {data} ({size} bytes), and do not")
    if not len(first) or first[0] != 0 or first[-1] != sequences or np.any(np.diff(first) < 0):
        raise ValueError(f"{index}: its documents must begin with sequence 0 and end with {sequences}, in order")
    tokens = np.memmap(data, kind, "r") if size else np.zeros(0, kind)
    return Shard(tokens, ends[first])


def write_index(file: BinaryIO, kind: np.dtype, lengths: Iterable[np.ndarray] | np.ndarray) -> None:
    """The index of documents of these lengths, each of one sequence."""
    lengths = np.asarray(lengths, "<i4")
    starts = np.cumsum(lengths, dtype="<i8") - lengths
    head = np.array([(VERSION, CODES[kind], len(lengths), len(lengths) + 1)], HEAD)
    file.write(MAGIC + head.tobytes() + lengths.tobytes() + (starts * kind.itemsize).astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
