"""Model directories are written piece by piece, from tensors, from ranks that each hold a part, or from other files."""

import errno
import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from .config import ModelConfig
from .directory import atomic_directory
from .files import FORMAT, INDEX, MODEL, Row, TensorRow, as_bytes, contract, count_bytes, dtype_name, report
from .fp8 import E4M3, METHOD, SCALE, quantize, scale_shape
from .model import model_specs
from .spec import Param, count, hf_keys, hf_shape, rows, shape
from .stored import Stored, at_rest, cuts
from .tree import flatten
from .writer import TensorWriter

SHARD_BYTES = 5 * 10**9
# What comes along with a model, by name: its tokenizer, its chat template, how it is sampled, its licence.
BESIDE = (
    *("tokenizer*", "tokenization_*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*"),
)
T = TypeVar("T")
# The number of all bytes -> what is called with each part of it.
Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]


def quiet(total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda count: None)


class Written(NamedTuple):
    """What a directory holds. checksum: of the numbers and their dtypes; the same for a native and a Hugging Face one
    of the same model, however it is cut into files."""

    tensors: int
    parameters: int
    bytes: int
    checksum: str


class Piece(NamedTuple):
    """Values of one tensor of the files, which follow those of the piece before. part: of the parameter's checksum."""

    key: str
    values: Tensor
    part: str


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model is written. dtype: of what may be cast; as it is held when None. fp8: its matrices by blocks."""

    native: bool
    dtype: torch.dtype | None = None
    fp8: bool = False

    def cast(self, row: Param, held: torch.dtype) -> torch.dtype:
        """The dtype of a parameter that is held in another: a wide one is never narrowed."""
        dtype = self.dtype or (torch.bfloat16 if self.fp8 else held)
        return at_rest(row, torch.promote_types(dtype, held) if row.wide else dtype)

    def tensors(self, path: str, row: Param, dims: Mapping[str, int], held: torch.dtype) -> list[TensorRow]:
        """The tensors of the files that a parameter becomes."""
        dtype, size = self.cast(row, held), hf_shape(row, dims)
        if self.native:
            return [(path, dtype, shape(row, dims))]
        if not (self.fp8 and row.quantized):
            return [(key, dtype, size) for key in hf_keys(row, dims)]
        return [
            written
            for key in hf_keys(row, dims)
            for written in ((key, E4M3, size), (key + SCALE, torch.float32, scale_shape(size)))
        ]

    def pieces(self, path: str, row: Param, dims: Mapping[str, int], leaf: Tensor | Stored) -> Iterator[Piece]:
        """A parameter's values in order, cast; raises ValueError if they do not fit into what they are cast to."""
        size, dtype = hf_shape(row, dims), self.cast(row, leaf.dtype)
        read = leaf.read_flat if isinstance(leaf, Stored) else partial(torch.narrow, leaf.detach().reshape(-1), 0)
        begin = 0
        for key in hf_keys(row, dims):
            for start, number in cuts(size):
                values = read(begin + start, number)
                if self.fp8 and row.quantized:
                    try:
                        held, scales = quantize(values.view(-1, size[1]))
                    except ValueError as error:
                        raise ValueError(f"{key} {error}") from error
                    yield Piece(key, held.cpu(), path)
                    yield Piece(key + SCALE, scales.cpu(), path + SCALE)
                else:
                    cast = values.to(dtype).cpu()
                    if dtype != values.dtype and not torch.equal(cast.isfinite(), values.isfinite().cpu()):
                        raise ValueError(
                            f"{key} has numbers above the largest of {dtype_name(dtype)}: take another dtype"
                        )
                    yield Piece(path if self.native else key, cast, path)
            begin += math.prod(size)


def save(path: str | Path, params: Mapping[str, Any], cfg: ModelConfig, overwrite: bool = False, **how: Any) -> Written:
    """Write a native directory: config.json and model.safetensors or shards of it, whose keys are the tree's paths.

    As `save_hf` otherwise.
    """
    return write_model(path, params, cfg, Form(native=True), overwrite, **how)


def save_hf(
    path: str | Path, params: Mapping[str, Any], cfg: ModelConfig, overwrite: bool = False, **how: Any
) -> Written:
    """Write a Hugging Face directory: config.json, and model.safetensors or shards with their index.

    It appears whole or not at all; with `overwrite` it takes the place of an older one.
    how: see `write_model`. Raises ValueError if the parameters are not those of `cfg`, and as `atomic_directory` does.
    """
    return write_model(path, params, cfg, Form(native=False), overwrite, **how)


def write_model(
    path: str | Path,
    params: Mapping[str, Any],
    cfg: ModelConfig,
    form: Form,
    overwrite: bool = False,
    *,
    shard_bytes: int = SHARD_BYTES,
    beside: Path | None = None,
    gather: Callable[[Any], Tensor] = lambda leaf: leaf,
    writer: bool = True,
    workers: int = 1,
    progress: Progress = quiet,
) -> Written:
    """Write a model in a form; leaves are tensors or `Stored`, of which only pieces are held.

    shard_bytes: the most that the tensors of a file take; a larger tensor gets a file of its own. beside: a directory
    whose tokenizer and generation files come along. gather: makes a plain tensor of a leaf that is sharded. With
    several ranks each must call this, since each takes part in the gathers; only the `writer` writes. workers: how
    many parameters are written at once. progress: number of all bytes -> what is to be called with each part of them.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes ({shard_bytes}) must be at least 1")
    specs, dims = model_specs(cfg), cfg.dims
    flat = fitting(params, specs, cfg)
    table = dict(rows(specs))
    header = [tensor for key, row in table.items() for tensor in form.tensors(key, row, dims, flat[key].dtype)]
    total = sum(map(count_bytes, header))
    whole = ((key, row, gather(flat[key])) for key, row in table.items())
    sums: list[str] = []

    def write(directory: Path) -> None:
        refuse_space(directory, total)
        write_config(directory, cfg, form, dtype_name(header[0][1]))
        carry(beside, directory)
        files = shards(header, shard_bytes)
        if len(files) > 1:
            served = {key: file for file, tensors in files.items() for key, _, _ in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": served}
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        out = TensorWriter(directory, files, {"format": FORMAT if form.native else "pt"})
        stop = Event()

        with progress(total) as tick:

            def copy(path: str, row: Param, leaf: Tensor | Stored) -> list[str]:
                running = Running()
                for piece in form.pieces(path, row, dims, leaf):
                    if stop.is_set():
                        break
                    out.write(piece.key, piece.values)
                    running.add(piece)
                    tick(piece.values.nbytes)
                return running.lines

            for lines in at_once(copy, whole, workers, stop):
                sums.extend(lines)
        out.close()

    try:
        if writer:
            with atomic_directory(path, overwrite) as directory:
                write(directory)
    finally:
        deque(whole, maxlen=0)  # whatever became of the writing, take part in the gathers that the others wait in
    return Written(len(header), count(specs, dims), total, combine(sums))


def at_once(function: Callable[..., T], items: Iterable[tuple], workers: int, stop: Event) -> Iterator[T]:
    """Call a function for so many items at a time; one is taken when another has ended, and a failure stops all."""
    pending: set[Future[T]] = set()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.add(pool.submit(function, *item))
                del item  # held by nobody while the next one is made
                if len(pending) == workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in pending)
        except BaseException:
            stop.set()
            raise


class Running:
    """The checksums of a parameter's parts while their bytes go by."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[torch.dtype, Any]] = {}

    def add(self, piece: Piece) -> None:
        _, state = self.parts.setdefault(piece.part, (piece.values.dtype, xxhash.xxh3_128()))
        state.update(as_bytes(piece.values))

    @property
    def lines(self) -> list[str]:
        return [f"{part} {dtype_name(dtype)} {state.hexdigest()}" for part, (dtype, state) in self.parts.items()]


def combine(lines: Iterable[str]) -> str:
    return xxhash.xxh3_128("\n".join(sorted(lines)).encode()).hexdigest()


def fitting(params: Mapping[str, Any], specs: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The leaves by path, in the model's order, once they are known to be those of the model."""
    flat = flatten(params)
    found = {path: Row("the parameters", leaf.dtype, tuple(leaf.shape)) for path, leaf in flat.items()}
    faults = contract(found, {path: shape(row, cfg.dims) for path, row in rows(specs)})
    if faults:
        raise ValueError(report("the parameter tree", faults))
    return {path: flat[path] for path, _ in rows(specs)}


def refuse_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed there, {free:,} are free", str(directory.parent))


def write_config(directory: Path, cfg: ModelConfig, form: Form, dtype: str) -> None:
    config = cfg.to_hf() | ({"format": FORMAT} if form.native else {"torch_dtype": dtype}) | {"dtype": dtype}
    if form.fp8:
        kept = [
            key.removesuffix(".weight")
            for _, row in rows(model_specs(cfg))
            if row.fan_in and not row.quantized
            for key in hf_keys(row, cfg.dims)
        ]
        config["quantization_config"] = METHOD | {"modules_to_not_convert": kept}
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def carry(beside: Path | None, directory: Path) -> None:
    for found in (path for pattern in BESIDE for path in (beside.glob(pattern) if beside else ())):
        if found.is_dir():
            shutil.copytree(found, directory / found.name)
        else:
            shutil.copyfile(found, directory / found.name)


def shards(header: Sequence[TensorRow], limit: int) -> dict[str, list[TensorRow]]:
    """The tensors of each file, in order; a file takes as many as stay within the limit."""
    parts: list[list[TensorRow]] = []
    room = 0
    for row in header:
        if not parts or count_bytes(row) > room:
            parts.append([])
            room = limit
        parts[-1].append(row)
        room -= count_bytes(row)
    if len(parts) == 1:
        return {MODEL: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}
