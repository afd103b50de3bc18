"""Model directories, native and Hugging Face: both hold the same numbers, keyed by path or by the rows' HF keys.

A native directory has `"format": "glm5fn"` in its config.json. Nothing is transposed on the way in or out: joined
dims are viewed as one, and a row with several keys is stacked from them, so a round trip keeps every bit.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from .config import ModelConfig
from .files import (
    INDEX,
    MODEL,
    Row,
    Rows,
    TensorFiles,
    TensorRow,
    atomic_directory,
    contract,
    count_bytes,
    dtype_name,
    report,
    write_tensors,
)
from .model import model_specs
from .spec import Param, hf_keys, hf_shape, rows, shape
from .stored import Source, Stored, at_rest, copies, differing_copies, sources, without_absent_mtp
from .tree import flatten, tree_map, unflatten

FORMAT = "glm5fn"
BUFFER = "rotary_emb.inv_freq"  # older checkpoints hold it; it follows from the config
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def open_model(path: str | Path, cfg: ModelConfig | None = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Open a native or a Hugging Face directory without reading a tensor.

    cfg: the model that it must hold, instead of the one of its config.json.
    Returns the config, and the parameters as `Stored` leaves in the model's order. Where a Hugging Face config.json
    promises multi-token prediction and no tensor of it is there, the config that is returned has it off, and a warning
    says so.
    Raises ConfigError for the config, and ValueError that names every missing, unexpected, misshapen, non-float or
    unreadable tensor with its file.
    """
    if not Path(path).is_dir():
        raise ValueError(f"{path}: is {'a file' if Path(path).exists() else 'not there'}, must be a model's directory")
    model = promised = cfg or ModelConfig.from_hf(path)
    config = json.loads((Path(path) / "config.json").read_text("utf-8"))
    native = config.get("format") == FORMAT
    spare = {} if native else copies(promised)
    served: dict[str, Source] = {}

    def faults(found: Rows) -> list[str]:
        nonlocal model
        model = model if native or cfg else without_absent_mtp(model, found)
        served.update(sources(model, found, native))
        found = {k: row for k, row in found.items() if not (k.endswith(BUFFER) or k in spare)}
        quantized = "config.json has a quantization_config: FP8 checkpoints are not supported yet"
        return [
            *([quantized] if config.get("quantization_config") else []),
            *contract(found, {key: source.stored_shape for source in served.values() for key in source.keys}),
            *dtype_faults(found, (source.keys for source in served.values())),
        ]

    files = TensorFiles.open(path, faults)
    if differing := differing_copies(files, spare):
        raise ValueError(report(path, differing))
    if model != promised:
        sets = promised.num_nextn_predict_layers
        notice = f"num_nextn_predict_layers is {sets}, but no tensor of it is there: multi-token prediction is off"
        warn(f"{path}: {notice}", stacklevel=2)
    stored = {place: Stored(files, source) for place, source in served.items()}
    rounded = [key for leaf in stored.values() for key in leaf.source.keys if files.rows[key].dtype != leaf.dtype]
    if rounded:
        notice = f"rounded to less than float32, which is held from here on: {', '.join(rounded)}"
        warn(f"{path}: {notice}", stacklevel=2)
    return model, unflatten(stored)


def dtype_faults(found: Rows, stacks: Iterable[tuple[str, ...]]) -> list[str]:
    """The tensors that are not of a plain floating dtype, and those to be stacked that differ in theirs."""
    dtypes = {key: row.dtype for key, row in found.items() if row}
    return [
        f"{key} in {row.file} is {dtype_name(row.dtype)}, must be one of {', '.join(map(dtype_name, FLOATS))}"
        + (": FP8 checkpoints are not supported yet" if row.dtype.itemsize == 1 and row.dtype.is_floating_point else "")
        for row, key in ((row, key) for key, row in found.items() if row)
        if row.dtype not in FLOATS
    ] + [
        f"{', '.join(keys)} must have one dtype, have {', '.join(sorted(kinds))}"
        for keys in stacks
        if len(kinds := {dtype_name(dtypes[key]) for key in keys if key in dtypes}) > 1
    ]


def load(
    path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a model: a native or a Hugging Face directory -> its config and its parameters, in the model's order.

    dtype: of the parameters; the stored dtypes when None. Errors as in `open_model`.
    """
    cfg, stored = open_model(path)
    specs = model_specs(cfg)
    return cfg, tree_map(lambda row, leaf: leaf.read().to(device, row.dtype(dtype or leaf.dtype)), specs, stored)


def save(
    path: str | Path,
    params: Mapping[str, Any],
    cfg: ModelConfig,
    overwrite: bool = False,
    *,
    gather: Callable[[Any], Tensor] = lambda leaf: leaf,
    writer: bool = True,
) -> None:
    """Write a native directory: config.json and model.safetensors, whose keys are the paths of the tree.

    Tensors are written one by one, and the directory appears whole or not at all; with `overwrite` it takes the place
    of an older one. gather: makes a plain tensor of a leaf, which needs only `dtype` and `shape`: a sharded tensor,
    say, or one that is still `Stored`. With several ranks each must call this, since each takes part in the gathers;
    only the `writer` writes.
    Raises ValueError if the parameters are not those of `cfg`, and as `atomic_directory` does.
    """
    specs = model_specs(cfg)
    flat = fitting(params, specs, cfg)
    header = [(place, leaf.dtype, tuple(leaf.shape)) for place, leaf in flat.items()]
    tensors = (gather(leaf) for leaf in flat.values())

    def write(directory: Path) -> None:
        write_config(directory, cfg, format=FORMAT, dtype=dtype_name(header[0][1]))
        write_tensors(directory / MODEL, header, tensors, {"format": FORMAT})

    write_directory(path, overwrite, write, tensors, writer)


def save_hf(
    path: str | Path,
    params: Mapping[str, Any],
    cfg: ModelConfig,
    overwrite: bool = False,
    shard_bytes: int = 5 * 2**30,
    *,
    gather: Callable[[Any], Tensor] = lambda leaf: leaf,
    writer: bool = True,
) -> None:
    """Write a Hugging Face directory: config.json, and model.safetensors or shards with their index.

    shard_bytes: the most that the tensors of a shard take; a larger tensor gets a shard of its own. Else as `save`.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes ({shard_bytes}) must be at least 1")
    specs, dims = model_specs(cfg), cfg.dims
    flat = fitting(params, specs, cfg)
    header = [
        (key, at_rest(row, flat[place].dtype), hf_shape(row, dims))
        for place, row in rows(specs)
        for key in hf_keys(row, dims)
    ]
    tensors = chain.from_iterable(export(gather(flat[place]), row, dims) for place, row in rows(specs))

    def write(directory: Path) -> None:
        dtype = dtype_name(header[0][1])
        write_config(directory, cfg, dtype=dtype, torch_dtype=dtype)
        write_shards(directory, header, tensors, shard_bytes)

    write_directory(path, overwrite, write, tensors, writer)


def export(tensor: Tensor, param: Param, dims: Mapping[str, int]) -> Iterator[Tensor]:
    """The Hugging Face tensors of a row, as views where it can be."""
    tensor = tensor.to(at_rest(param, tensor.dtype))
    return iter(tensor.reshape(len(hf_keys(param, dims)), *hf_shape(param, dims)).unbind())


def fitting(params: Mapping[str, Any], specs: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """The leaves by path, in the model's order, once they are known to be those of the model."""
    flat = flatten(params)
    found = {place: Row("the parameters", leaf.dtype, tuple(leaf.shape)) for place, leaf in flat.items()}
    faults = contract(found, {place: shape(row, cfg.dims) for place, row in rows(specs)})
    if faults:
        raise ValueError(report("the parameter tree", faults))
    return {place: flat[place] for place, _ in rows(specs)}


def write_directory(
    path: str | Path, overwrite: bool, write: Callable[[Path], None], tensors: Iterator[Tensor], writer: bool
) -> None:
    """Let the writer write; whatever becomes of that, take part in the gathers that the other ranks wait in."""
    try:
        if writer:
            with atomic_directory(path, overwrite) as directory:
                write(directory)
    finally:
        deque(tensors, maxlen=0)


def write_config(directory: Path, cfg: ModelConfig, **more: str) -> None:
    text = json.dumps(cfg.to_hf() | more, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def write_shards(directory: Path, header: Sequence[TensorRow], tensors: Iterator[Tensor], limit: int) -> None:
    shards: list[list[TensorRow]] = []
    room = 0
    for row in header:
        if not shards or count_bytes(row) > room:
            shards.append([])
            room = limit
        shards[-1].append(row)
        room -= count_bytes(row)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [MODEL]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(directory / file, shard, islice(tensors, len(shard)), {"format": "pt"})
    if len(shards) > 1:
        served = {key: file for file, shard in zip(files, shards, strict=True) for key, _, _ in shard}
        index = {"metadata": {"total_size": sum(map(count_bytes, header))}, "weight_map": served}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
