"""Directories of safetensors files, read and written so that nothing is lost.

The format is 8 bytes of header length, a JSON header, and the tensors one after the other
(https://huggingface.co/docs/safetensors). Reading goes through safetensors; writing is done here, since the sizes
are known before the tensors are, so each can be written and let go.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from .spec import Region, whole

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
    """One tensor of a directory: the name of the file that serves it, its dtype and its shape."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


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


@contextmanager
def atomic_directory(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary directory that takes the place of `path`, whole and on disk, once the block ends.

    An exception removes it and leaves `path` as it was. A kill leaves at most names that begin with a dot, which the
    next writer to `path` clears away; see `settle`. Raises ValueError, before any work, if `path` exists and may not
    be overwritten, or is something else than a directory of tensor files.
    """
    target = Path(path).resolve()
    settle(target)
    if target.exists():
        if not overwrite:
            raise ValueError(f"{path} exists already: name another place, or allow it to be overwritten")
        if not target.is_dir() or (any(target.iterdir()) and not any(target.glob("*.safetensors"))):
            raise ValueError(f"{path} is not a directory of safetensors files, so it is not overwritten: name another")
    temporary = aside(target, "partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
        if overwrite and target.exists():
            target.rename(aside(target, "replaced"))
        temporary.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        settle(target)


def settle(path: Path) -> None:
    """Finish what a killed overwrite of `path` left undone: drop the old directory, or put it back if none is there."""
    old = aside(path, "replaced")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def aside(path: Path, why: str) -> Path:
    return path.parent / f".{path.name}.{why}"


def sync(path: Path) -> None:
    """Wait until a file or directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(
    path: str | Path, rows: Sequence[TensorRow], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, holding one tensor at a time.

    rows: key, dtype and shape of every tensor. tensors: the tensors in that order, on any device.
    Raises ValueError for a dtype that the format lacks, a repeated key, and a tensor that is not what its row says.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, dtype, size in rows:
        if dtype not in CODES:
            raise ValueError(f"{key} has dtype {dtype_name(dtype)}, must be one of {', '.join(map(dtype_name, CODES))}")
        if key in header:
            raise ValueError(f"{key} stands twice in the rows of {path}: each tensor needs a key of its own")
        end = offset + count_bytes((key, dtype, size))
        header[key] = {"dtype": CODES[dtype], "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        stream = iter(tensors)
        for row in rows:
            file.write(to_bytes(row, next(stream, None)))  # held by nobody while the next one is made
        if next(stream, None) is not None:
            raise ValueError(f"{path} got more tensors than its {len(rows)} rows")


def to_bytes(row: TensorRow, tensor: Tensor | None) -> memoryview:
    key, dtype, size = row
    found = None if tensor is None else (dtype_name(tensor.dtype), tuple(tensor.shape))
    if tensor is None or found != (dtype_name(dtype), tuple(size)):
        raise ValueError(f"{key} came as {found}, must be {(dtype_name(dtype), tuple(size))}, as its row says")
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
        directory = Path(directory)
        if (directory / INDEX).exists():
            return cls(directory, checked(directory, *read_shards(directory), check))
        if (directory / MODEL).exists():
            return cls.open_file(directory / MODEL, check)
        raise ValueError(f"{directory} has neither {MODEL} nor {INDEX}: name a directory that holds a whole model")

    @classmethod
    def open_file(cls, path: str | Path, check: Callable[[Rows], list[str]] = lambda rows: []) -> "TensorFiles":
        """Open one safetensors file of any name; otherwise as `open`."""
        path = Path(path)
        try:
            rows, faults = read_header(path), []
        except ValueError as fault:
            raise ValueError(report(path.parent, [str(fault)])) from fault
        return cls(path.parent, checked(path.parent, rows, faults, check))

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """One tensor, or the region of it that starts at and has the size of each pair; in memory of its own."""
        row = self.rows[key]
        region = whole(row.shape) if region is None else region
        with safe_open(self.directory / row.file, "pt") as file:
            part = file.get_slice(key)[tuple(slice(start, start + size) for start, size in region)]
            part = part.clone(memory_format=torch.contiguous_format)  # it was a view of the mapped file
        assert part.shape == tuple(size for _, size in region), f"{key} {row.shape} does not contain {region}"
        return part


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


def read_shards(directory: Path) -> tuple[dict[str, Row | None], list[str]]:
    """The rows that the index lists, and the faults of the files that it names."""
    try:
        index = json.loads((directory / INDEX).read_text("utf-8"), object_pairs_hook=unique)["weight_map"]
        files: dict[str, list[str]] = {}
        for key, file in index.items():
            files.setdefault(file, []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / INDEX} cannot be read as an index of tensors ({error!r})") from error
    rows: dict[str, Row | None] = dict.fromkeys(index)
    faults: list[str] = []
    for file, keys in files.items():
        try:
            header = read_header(directory / file)
        except ValueError as fault:
            faults.append(f"{fault}; {INDEX} wants of it: {', '.join(keys)}")
            continue
        rows |= {key: header[key] for key in keys if key in header}
        lacking = [key for key in keys if key not in header]
        unlisted = [key for key in header if key not in index]
        faults += [f"{file} lacks tensors that {INDEX} lists: {', '.join(lacking)}"] if lacking else []
        faults += [f"{file} has tensors that {INDEX} does not list: {', '.join(unlisted)}"] if unlisted else []
    return rows, faults


def read_header(path: Path) -> dict[str, Row]:
    """The rows of one file. Raises ValueError that names the file, and the tensors that a truncated one has lost."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
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
            rows[key] = Row(path.name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            expected = [end, end + count_bytes((key, *rows[key][1:]))]
            if entry["data_offsets"] != expected:
                raise ValueError(f"{key} stands at bytes {entry['data_offsets']}, its place and size are {expected}")
            end = expected[1]
            cut += [key] if start + end > size else []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} cannot be read as safetensors ({error})") from error
    if cut:
        raise ValueError(f"{path.name} is truncated ({size} bytes, must have {start + end}), losing {', '.join(cut)}")
    if start + end < size:
        raise ValueError(f"{path.name} has {size} bytes, its tensors end at {start + end}")
    return rows


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys may not repeat."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated keys: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return found
