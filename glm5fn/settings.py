"""Every setting of a run as frozen dataclasses, what of it is refused, and its file `config.yaml`."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

import yaml
from tyro.conf import Fixed  # a setting that has no flag

from .config import ConfigError, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Placements as names: mesh axis -> the tensor axes that it may split, best first (see `spec.split_dims`).

    store: how parameters and moments rest.
    """

    store: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Ranks of each kind; their product is the number of processes."""

    dp_replicate: int = 1  # whole copies of the state
    dp_shard: int = 1  # parts that one copy of the state is cut into

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how many samples make a step."""

    path: str | None = None  # .jsonl, .txt, or .safetensors of fixed batches; none: the text that ships with Python
    field: str = "text"  # the key of a jsonl row that holds the text
    tokenizer: str = "bytes"  # "bytes", or the path of a tokenizer.json
    seq_len: int = 256  # tokens a sample
    global_batch: int = 4  # samples a step, over all ranks
    micro_batch: int = 1  # samples a forward pass on one rank
    held_out: float = 0.02  # the fraction of windows, at the end of the text, that is kept for evaluation


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule: linear warm-up, then `schedule` down to `min_lr` at `decay_steps`."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    min_lr: float = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 10
    decay_steps: int = 1000  # where the schedule ends; --steps only says where a run stops
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # the largest global gradient norm; 0 does not clip


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When training state is saved, and how many saves stay."""

    every: int = 0  # steps between saves; 0 saves at the end only
    keep: int = 2  # complete checkpoints that stay


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides the numbers of a run; `config.yaml` in the run directory is this, resolved."""

    name: Fixed[str]
    model: ModelConfig
    layout: Fixed[Layout]
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: int = 100  # where the run stops
    seed: int = 0
    deterministic: bool = False  # sum gradients in fp64, so that data-parallel layouts agree to the bit
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"  # of the computation; parameters and moments are always fp32
    recompute: Literal["none", "layer"] = "none"  # layer: keep only each layer's input for the backward pass
    compile: bool = False  # compile the block with torch.compile
    eval_every: int = 0  # steps between evaluations on the held-out windows; 0 evaluates at the end only
    tensorboard: bool = False  # also write TensorBoard events

    def __post_init__(self) -> None:
        refuse(self)


def refuse(run: RunConfig) -> None:
    """Raise ConfigError for every setting that cannot be run, with the equation spelled out."""
    data, optim, mesh = run.data, run.optim, run.mesh
    problems: list[str] = []

    def need(holds: bool, text: str) -> None:
        if not holds:
            problems.append(text)

    for name in ("dp_replicate", "dp_shard"):
        value = getattr(mesh, name)
        need(value >= 1, f"mesh.{name.replace('_', '-')} ({value}) must be at least 1")
    for name in ("seq_len", "global_batch", "micro_batch"):
        value = getattr(data, name)
        need(value >= 1, f"data.{name.replace('_', '-')} ({value}) must be at least 1")
    need(run.steps >= 1, f"steps ({run.steps}) must be at least 1")
    need(run.seed >= 0, f"seed ({run.seed}) must be at least 0")
    need(run.eval_every >= 0, f"eval-every ({run.eval_every}) must be at least 0")
    need(0 <= data.held_out < 1, f"data.held-out ({data.held_out}) must be at least 0 and below 1")
    need(0 < optim.lr < float("inf"), f"optim.lr ({optim.lr}) must be a finite number above 0")
    need(0 <= optim.min_lr <= optim.lr, f"optim.min-lr ({optim.min_lr}) must be from 0 to optim.lr ({optim.lr})")
    need(optim.warmup_steps >= 0, f"optim.warmup-steps ({optim.warmup_steps}) must be at least 0")
    need(
        optim.decay_steps > optim.warmup_steps,
        f"optim.decay-steps ({optim.decay_steps}) must be above optim.warmup-steps ({optim.warmup_steps})",
    )
    for name in ("beta1", "beta2"):
        value = getattr(optim, name)
        need(0 <= value < 1, f"optim.{name} ({value}) must be at least 0 and below 1")
    for name in ("eps", "weight_decay", "clip"):
        value = getattr(optim, name)
        need(0 <= value < float("inf"), f"optim.{name.replace('_', '-')} ({value}) must be finite and at least 0")
    need(run.checkpoint.every >= 0, f"checkpoint.every ({run.checkpoint.every}) must be at least 0")
    need(run.checkpoint.keep >= 1, f"checkpoint.keep ({run.checkpoint.keep}) must be at least 1")
    need(
        data.seq_len <= run.model.max_position_embeddings,
        f"data.seq-len ({data.seq_len}) must be at most the model's max_position_embeddings "
        f"({run.model.max_position_embeddings})",
    )
    if not problems:
        rows = mesh.world * data.micro_batch
        need(
            data.global_batch % rows == 0,
            f"data.global-batch ({data.global_batch}) must be a multiple of data.micro-batch ({data.micro_batch}) x "
            f"mesh.dp-replicate ({mesh.dp_replicate}) x mesh.dp-shard ({mesh.dp_shard}) = {rows}",
        )
    if problems:
        raise ConfigError("; ".join(problems))


def dump(run: RunConfig) -> str:
    """The resolved settings as YAML text; `load` reads them back equal."""
    return yaml.safe_dump(plain(dataclasses.asdict(run)), sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> RunConfig:
    """Read a `config.yaml`. Raises ConfigError that names the file and each unknown, missing or mistyped setting."""
    try:
        return build(RunConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


def build(kind: Any, value: Any, name: str) -> Any:
    """Make a value of a type from what YAML gave."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name or 'the file'} must be a mapping of settings, is {value!r}")
        types = typing.get_type_hints(kind)
        for key in value:
            if key not in types:
                near = difflib.get_close_matches(str(key), types, 1)
                raise ConfigError(f"{name}{key} is no setting" + (f": did you mean {near[0]}?" if near else ""))
        try:
            return kind(**{key: build(types[key], item, f"{name}{key}.") for key, item in value.items()})
        except TypeError as error:
            raise ConfigError(f"{name or 'the file'}: {error}") from error
    label = name.removesuffix(".")
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{label} ({value!r}) must be one of {', '.join(map(str, args))}")
    if origin is UnionType:
        return None if value is None and NoneType in args else build(args[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(build(args[0], item, name) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: build(args[1], item, f"{name}{key}.") for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise ConfigError(f"{label} ({value!r}) must be of type {getattr(kind, '__name__', kind)}")
