"""Safetensors files, written by pieces: the sizes are known before the tensors are, so no tensor need be held whole."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from .files import CODES, TensorRow, as_bytes, count_bytes, dtype_name

PIECE = 1 << 20  # bytes that are summed and written at once


class Place(NamedTuple):
    """Where a tensor goes: from one byte of a file to another."""

    path: Path
    dtype: torch.dtype
    start: int
    end: int


class TensorWriter:
    """Writes files whose tensors come in pieces: those of one tensor in order, the tensors in any.

    files: for each file's name the key, dtype and shape of its tensors. Several threads may write, each a tensor.
    Raises ValueError as `header` does, and for a key in several files.
    """

    def __init__(self, directory: Path, files: Mapping[str, Sequence[TensorRow]], metadata: Mapping[str, str]):
        self.places: dict[str, Place] = {}
        for name, rows in files.items():
            if twice := [row[0] for row in rows if row[0] in self.places]:
                raise ValueError(f"{', '.join(twice)}: in several files of {directory}, each key must be in one")
            head = header(rows, metadata)
            end = len(head)
            for row in rows:
                self.places[row[0]] = Place(directory / name, row[1], end, end + count_bytes(row))
                end += count_bytes(row)
            with (directory / name).open("wb") as file:
                file.write(head)
                file.truncate(end)
        self.at = {key: place.start for key, place in self.places.items()}  # where the next piece goes

    def write(self, key: str, piece: Tensor) -> None:
        """Write the next values of a tensor. Raises ValueError if they are not of its dtype, or more than it has."""
        path, dtype, _, end = self.places[key]
        at = self.at[key]
        if piece.dtype != dtype or at + piece.nbytes > end:
            came = f"{piece.numel()} values of {dtype_name(piece.dtype)}"
            raise ValueError(f"{key} gets {came}, must get {(end - at) // dtype.itemsize} of {dtype_name(dtype)}")
        data = as_bytes(piece)
        with path.open("r+b", buffering=0) as file:
            while data:
                written = os.pwrite(file.fileno(), data, at)
                data, at = data[written:], at + written
        self.at[key] = at

    def close(self) -> None:
        """Raises ValueError that names every tensor of which something has not been written."""
        if short := [key for key, place in self.places.items() if self.at[key] != place.end]:
            raise ValueError(f"not written to their ends: {', '.join(short)}")


def header(rows: Sequence[TensorRow], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with: what it says of its tensors, behind the length of that.

    Raises ValueError for a dtype that the format lacks, and for a repeated key.
    """
    found: dict[str, dict] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, dtype, size in rows:
        if dtype not in CODES:
            raise ValueError(f"{key} has dtype {dtype_name(dtype)}, must be one of {', '.join(map(dtype_name, CODES))}")
        if key in found:
            raise ValueError(f"{key} stands twice among the tensors of a file: each needs a key of its own")
        end = offset + count_bytes((key, dtype, size))
        found[key] = {"dtype": CODES[dtype], "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: str | Path, rows: Sequence[TensorRow], tensors: Iterable[Tensor | None], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write a file, holding one tensor at a time. Returns its bytes and their checksum (XXH3, 128 bits).

    rows: key, dtype and shape of every tensor. tensors: the tensors in that order, on any device.
    Raises ValueError as `header` does, and for a tensor that is not what its row says.
    """
    stream = iter(tensors)
    digest, size = xxhash.xxh3_128(), 0

    def put(data: bytes | memoryview) -> None:
        nonlocal size
        size += len(data)
        for start in range(0, len(data), PIECE):  # so that what is summed is still in the cache when it is written
            piece = memoryview(data)[start : start + PIECE]
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) :]

    head = header(rows, metadata)
    with Path(path).open("wb", buffering=0) as file:
        put(head)
        for row in rows:
            put(as_bytes(as_its_row_says(row, next(stream, None))))  # held by nobody while the next one is made
        if next(stream, None) is not None:
            raise ValueError(f"{path} got more tensors than its {len(rows)} rows")
    return size, digest.hexdigest()


def as_its_row_says(row: TensorRow, tensor: Tensor | None) -> Tensor:
    key, dtype, size = row
    found = None if tensor is None else (dtype_name(tensor.dtype), tuple(tensor.shape))
    if tensor is None:
        raise ValueError(f"{key} did not come: there is no more, or no memory for its {count_bytes(row):,} bytes")
    if found != (dtype_name(dtype), tuple(size)):
        raise ValueError(f"{key} came as {found}, must be {(dtype_name(dtype), tuple(size))}, as its row says")
    return tensor
