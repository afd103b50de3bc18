"""Safetensors files, written by pieces: the sizes are known before the tensors are, so no tensor need be held whole."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .files import CODES, TensorRow, as_bytes, count_bytes, dtype_name


class Place(NamedTuple):
    """Where a tensor goes: from one byte of a file to another."""

    path: Path
    dtype: torch.dtype
    start: int
    end: int


class TensorWriter:
    """Writes files whose tensors come in pieces: those of one tensor in order, the tensors in any.

    files: for each file's name the key, dtype and shape of its tensors. Several threads may write, each a tensor.
    Raises ValueError for a dtype that the format lacks, and for a repeated key.
    """

    def __init__(self, directory: Path, files: Mapping[str, Sequence[TensorRow]], metadata: Mapping[str, str]):
        self.places: dict[str, Place] = {}
        for name, rows in files.items():
            header = {"__metadata__": dict(metadata)} | entries(rows)
            if twice := [key for key in header if key in self.places]:
                raise ValueError(f"{', '.join(twice)}: in several files of {directory}, each key must be in one")
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            first = end = 8 + len(text)
            for row in rows:
                self.places[row[0]] = Place(directory / name, row[1], end, end + count_bytes(row))
                end += count_bytes(row)
            with (directory / name).open("wb") as file:
                file.write((first - 8).to_bytes(8, "little") + text)
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


def entries(rows: Sequence[TensorRow]) -> dict[str, dict]:
    """What a file's header says of its tensors."""
    found, offset = {}, 0
    for key, dtype, size in rows:
        if dtype not in CODES:
            raise ValueError(f"{key} has dtype {dtype_name(dtype)}, must be one of {', '.join(map(dtype_name, CODES))}")
        if key in found:
            raise ValueError(f"{key} stands twice among the tensors of a file: each needs a key of its own")
        end = offset + count_bytes((key, dtype, size))
        found[key] = {"dtype": CODES[dtype], "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    return found


def write_tensors(
    path: str | Path, rows: Sequence[TensorRow], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file, holding one tensor at a time.

    rows: key, dtype and shape of every tensor. tensors: the tensors in that order, on any device.
    Raises ValueError as `TensorWriter` does, and for a tensor that is not what its row says.
    """
    path = Path(path)
    writer = TensorWriter(path.parent, {path.name: rows}, metadata)
    stream = iter(tensors)
    for row in rows:
        writer.write(row[0], as_its_row_says(row, next(stream, None)))  # held by nobody while the next one is made
    if next(stream, None) is not None:
        raise ValueError(f"{path} got more tensors than its {len(rows)} rows")
    writer.close()


def as_its_row_says(row: TensorRow, tensor: Tensor | None) -> Tensor:
    key, dtype, size = row
    found = None if tensor is None else (dtype_name(tensor.dtype), tuple(tensor.shape))
    if tensor is None or found != (dtype_name(dtype), tuple(size)):
        raise ValueError(f"{key} came as {found}, must be {(dtype_name(dtype), tuple(size))}, as its row says")
    return tensor
