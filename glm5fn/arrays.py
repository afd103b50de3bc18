"""Tensors as zarr3 arrays in one OCDBT store on tensorstore: every rank writes and reads its own parts.

A place is a URL of a key-value store that tensorstore knows, such as file:///a/directory/ or gs://bucket/a/prefix/.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
import torch
from torch import Tensor

from .files import CODES, Row, Rows, dtype_name, report
from .mesh import Held
from .spec import Region, slices, whole

MARK = "zarr.json"  # the key of an array's metadata
FILE = 1 << 28  # bytes of a file, about: one is read at once to check it
NAMED = {dtype_name(dtype): dtype for dtype in CODES}  # tensorstore calls them as torch does
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def store(place: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": place, "target_data_file_size": FILE}


def spec(place: str, key: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": store(place) | {"path": f"{key}/"},
        "store_data_equal_to_fill_value": True,  # which -0.0 is too, and is another number
    }


def metadata(held: Held) -> dict[str, Any]:
    """A chunk is the part that one rank has, so that ranks write and read no chunk together."""
    return {
        "shape": list(held.shape),
        "data_type": dtype_name(held.values.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(n, 1) for n in held.chunk]}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }


def write_arrays(place: str, tensors: Mapping[str, Held], rank: int) -> None:
    """Write this rank's parts in one transaction; rank 0 writes what describes the arrays too.

    All ranks of a run may do so at once: a part is of one rank, and the store takes transactions in any order.
    Raises OSError that names the place.
    """
    context, transaction = ts.Context(), ts.Transaction()
    regions = {key: held.written_by(rank) for key, held in tensors.items()}
    wanted = {key: tensors[key] for key, region in regions.items() if region is not None or rank == 0}
    try:
        opened = {
            key: ts.open(
                spec(place, key) | {"metadata": metadata(held)},
                context=context,
                transaction=transaction,
                open=True,
                create=rank == 0,
                assume_metadata=rank != 0,
            )
            for key, held in wanted.items()
        }
        writes = [
            opened[key]
            .result()[slices(region)]
            .write(as_array(held.values), can_reference_source_data_indefinitely=True)
            for key, held in wanted.items()
            if (region := regions[key]) is not None
        ]
        for write in writes:
            write.copy.result()
        for array in opened.values():
            array.result()
        transaction.commit_sync()
    except Exception as error:  # the library has many kinds
        transaction.abort()  # or it might still write
        raise OSError(f"{place}: {error}") from error


def as_array(values: Tensor) -> np.ndarray:
    """A tensor as an array, of the same memory if it is on the CPU."""
    kind = ts.dtype(dtype_name(values.dtype)).numpy_dtype
    return values.detach().cpu().contiguous().view(BITS[values.element_size()]).numpy().view(kind)


@dataclass(frozen=True)
class Arrays:
    """The arrays of an item, by key; they are read as those of `files.TensorFiles` are."""

    place: str
    arrays: Mapping[str, ts.TensorStore]

    @classmethod
    def open(cls, place: str, item: str, check: Callable[[Rows], list[str]] = lambda rows: []) -> "Arrays":
        """Raises ValueError that names the place for what is no such store, and for what `check` says of its rows."""
        context, end = ts.Context(), f"/{MARK}"
        try:
            keys = ts.KvStore.open(store(place), context=context).result().list().result()
            names = [name.decode().removesuffix(end) for name in keys if name.endswith(end.encode())]
            wanted = [name for name in names if name.startswith(f"{item}/")]
            opened = [(name, ts.open(spec(place, name), context=context, open=True)) for name in wanted]
            arrays = {name.removeprefix(f"{item}/"): future.result() for name, future in opened}
        except Exception as error:
            raise ValueError(f"{place}: cannot be read as arrays of tensorstore ({error})") from error
        found = cls(place, arrays)
        if faults := check(found.rows):
            raise ValueError(report(place, faults))
        return found

    @property
    def rows(self) -> dict[str, Row]:
        return {key: Row(self.place, NAMED[array.dtype.name], tuple(array.shape)) for key, array in self.arrays.items()}

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """One tensor, or the region of it that starts at and has the size of each pair; in memory of its own."""
        array = self.arrays[key]
        region = whole(tuple(array.shape)) if region is None else region
        values = torch.empty([size for _, size in region], dtype=NAMED[array.dtype.name])
        if values.numel():
            try:
                as_array(values)[...] = array[slices(region)].read().result()
            except Exception as error:
                raise ValueError(f"{self.place}: {key} cannot be read ({error})") from error
        return values

    def read_flat(self, key: str, start: int, count: int) -> Tensor:
        """So many of a tensor's values from one on, in row-major order; the rows that they are in are read whole."""
        size = tuple(self.arrays[key].shape)
        if not size:
            return self.read(key).reshape(1)
        width = max(math.prod(size[1:]), 1)
        first, last = start // width, -(-(start + count) // width)
        rows = self.read(key, ((first, last - first), *whole(size[1:])))
        return rows.flatten()[start - first * width :][:count]
