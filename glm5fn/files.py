"""Directories of safetensors files: what is in them, what is wrong with them, and how tensors are read from them.

The format is 8 bytes of header length, a JSON header, and the tensors one after the other
(https://huggingface.co/docs/safetensors).
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .spec import Region, slices, whole

FORMAT = "glm5fn"  # of native directories and checkpoints, as their files say
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Row(NamedTuple):
    """One tensor of a directory: the name of the file that serves it, its dtype and shape, its first byte there."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0


Rows = Mapping[str, Row | None]  # None: the file that should serve this key is at fault
TensorRow = tuple[str, torch.dtype, tuple[int, ...]]  # key, dtype, shape


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as `config.json` spells it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def count_bytes(row: TensorRow) -> int:
    _, dtype, size = row
    return math.prod(size) * dtype.itemsize


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a directory, by key. Only the headers have been read."""

    directory: Path
    rows: Mapping[str, Row]

    @classmethod
    def open(cls, directory: str | Path, check: Callable[[Rows], list[str]] = lambda rows: []) -> "TensorFiles":
        """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        The index decides which file serves a key; a file that it does not name is not looked at.
        check: rows -> what else is wrong, such as `contract(rows, shapes)`.
        Raises ValueError that names all defects at once, each with its file and tensors.
        """
        return cls(Path(directory), checked(Path(directory), *survey_directory(Path(directory)), check))

    @classmethod
    def open_files(
        cls, directory: Path, names: Iterable[str], check: Callable[[Rows], list[str]] = lambda rows: []
    ) -> "TensorFiles":
        """Open the safetensors files of these names, no two of which may have a key; otherwise as `open`."""
        rows: dict[str, Row | None] = {}
        faults: list[str] = []
        for name in names:
            found, wrong = survey_file(directory / name)
            faults += [*wrong, *(f"{key} is in {name} and in another file" for key in found if key in rows)]
            rows |= found
        return cls(directory, checked(directory, rows, faults, check))

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """One tensor, or the region of it that starts at and has the size of each pair; in memory of its own."""
        row = self.rows[key]
        region = whole(row.shape) if region is None else region
        inside = all(0 <= start <= start + size <= n for (start, size), n in zip(region, row.shape, strict=True))
        assert inside, f"{key} {row.shape} does not contain {region}"
        if 0 in row.shape:
            return torch.empty([size for _, size in region], dtype=row.dtype)
        bits = np.dtype(f"i{row.dtype.itemsize}")
        mapped = np.memmap(self.directory / row.file, bits, "r", row.start, row.shape)
        part = mapped[slices(region)]
        return torch.from_numpy(np.array(part)).view(row.dtype)

    def read_flat(self, key: str, start: int, count: int) -> Tensor:
        """So many of a tensor's values from one on, in the order in which they lie in the file."""
        row = self.rows[key]
        values = torch.empty(count, dtype=row.dtype)
        room, at = as_bytes(values), row.start + start * row.dtype.itemsize
        with (self.directory / row.file).open("rb", buffering=0) as file:
            while room:
                if not (got := os.preadv(file.fileno(), [room], at)):
                    raise ValueError(f"{row.file} ends within {key}: it was cut short after it was opened")
                room, at = room[got:], at + got
        return values


def contract(rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps these rows from being exactly the tensors of `shapes`: all missing, unexpected and misshapen ones."""
    missing = [key for key in shapes if key not in rows]
    unexpected = [key + (f" in {row.file}" if row else "") for key, row in rows.items() if key not in shapes]
    return [
        *([f"missing: {', '.join(missing)}"] if missing else []),
        *([f"unexpected: {', '.join(unexpected)}"] if unexpected else []),
        *(
            f"{key} in {row.file} has shape {row.shape}, must be {shapes[key]}"
            for key, row in rows.items()
            if row and key in shapes and row.shape != shapes[key]
        ),
    ]


def report(place: str | Path, faults: Iterable[str]) -> str:
    return "\n  ".join([f"{place} does not hold what it must:", *faults])


def checked(directory: Path, rows: Rows, faults: list[str], check: Callable[[Rows], list[str]]) -> dict[str, Row]:
    faults = [*faults, *check(rows)]
    if faults:
        raise ValueError(report(directory, faults))
    return {key: row for key, row in rows.items() if row}


def survey_directory(directory: Path) -> tuple[dict[str, Row | None], list[str]]:
    """The rows of `model.safetensors`, or those that the index lists, and the faults of the files that serve them.

    Raises ValueError if there is neither, or an index that cannot be read.
    """
    if (directory / INDEX).exists():
        return read_shards(directory)
    if (directory / MODEL).exists():
        return survey_file(directory / MODEL)
    raise ValueError(f"{directory} has neither {MODEL} nor {INDEX}: name a directory that holds a whole model")


def survey_file(path: Path) -> tuple[dict[str, Row | None], list[str]]:
    try:
        return {**read_header(path.parent, path.name)}, []
    except ValueError as fault:
        return {}, [str(fault)]


def read_shards(directory: Path) -> tuple[dict[str, Row | None], list[str]]:
    """The rows that the index lists, and the faults of the files that it names."""
    try:
        index = json.loads((directory / INDEX).read_text("utf-8"), object_pairs_hook=unique)["weight_map"]
        files: dict[str, list[str]] = {}
        for key, file in index.items():
            files.setdefault(file, []).append(key)
        if wrong := [file for file in files if not (file and Path(file).name) or {"..", "/"} & {*Path(file).parts}]:
            raise ValueError(f"it must name files in this directory, names {', '.join(map(repr, wrong))}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{directory / INDEX} cannot be read as an index of tensors ({error!r})") from error
    rows: dict[str, Row | None] = dict.fromkeys(index)
    faults: list[str] = []
    for file, keys in files.items():
        try:
            header = read_header(directory, file)
        except ValueError as fault:
            faults.append(f"{fault}; {INDEX} wants of it: {', '.join(keys)}")
            continue
        rows |= {key: header[key] for key in keys if key in header}
        lacking = [key for key in keys if key not in header]
        unlisted = [key for key in header if key not in index]
        faults += [f"{file} lacks tensors that {INDEX} lists: {', '.join(lacking)}"] if lacking else []
        faults += [f"{file} has tensors that {INDEX} does not list: {', '.join(unlisted)}"] if unlisted else []
    return rows, faults


def read_header(directory: Path, name: str) -> dict[str, Row]:
    """The rows of one file. Raises ValueError that names the file, and the tensors that a truncated one has lost."""
    path = directory / name
    if not path.is_file():
        raise ValueError(f"{name} is missing")
    size = path.stat().st_size
    rows: dict[str, Row] = {}
    cut: list[str] = []
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                raise ValueError(f"{size} bytes, its header alone needs {start}")
            header = json.loads(file.read(start - 8), object_pairs_hook=unique)
        header.pop("__metadata__", None)
        end = 0
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{key} has dtype {entry['dtype']}, must be one of {', '.join(DTYPES)}")
            if not all(isinstance(n, int) and n >= 0 for n in entry["shape"]):
                raise ValueError(f"{key} has shape {entry['shape']}, must be whole numbers")
            rows[key] = Row(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + end)
            expected = [end, end + count_bytes((key, *rows[key][1:3]))]
            if entry["data_offsets"] != expected:
                raise ValueError(f"{key} stands at bytes {entry['data_offsets']}, its place and size are {expected}")
            end = expected[1]
            cut += [key] if start + end > size else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read as safetensors ({error})") from error
    if cut:
        raise ValueError(f"{name} is truncated ({size} bytes, must have {start + end}), losing {', '.join(cut)}")
    if start + end < size:
        raise ValueError(f"{name} has {size} bytes, its tensors end at {start + end}")
    return rows


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys may not repeat."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated keys: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return found
