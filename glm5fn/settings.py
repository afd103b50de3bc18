"""Every setting of a run as frozen dataclasses, what of it is refused, and its file `config.yaml`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from tyro.conf import Fixed  # a setting that has no flag

from .config import ModelConfig
from .tree import flatten
from .typed import ConfigError, build

CONFIG = "config.yaml"


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


# The optimizers, and the running means that each keeps of every parameter that learns.
MOMENTS = {"adamw": ("mean", "square"), "sgd": ()}


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
class IndexerConfig:
    """How the indexers of sparse attention are trained.

    stage: frozen trains all but them; dense-warmup trains them alone, while each query attends to all keys; sparse
    trains everything, on the selected keys.
    """

    stage: Literal["frozen", "dense-warmup", "sparse"] = "frozen"
    coef: float = 1.0  # of the indexers' loss
    teacher: Literal["source", "served"] = "source"  # the attention of its own layer, or of all that use its keys


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How the load of the experts is kept even."""

    bias_rate: float = 1e-3  # by which a step moves the bias of each expert's choice
    balance_coef: float = 0.0  # of the auxiliary loss for each sequence
    z_coef: float = 0.0  # of the squared log-sum of the router's logits


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """How multi-token prediction is trained."""

    coef: float = 0.1  # of the mean of the depths' losses
    share_indices: bool = False  # the depths after the first attend to the keys that the first selected
    detach_trunk: bool = False  # the layers of the main model learn nothing from it
    detach_head: bool = False  # the output projection learns nothing from it


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a training loss has beyond the cross-entropy of the next token."""

    indexer: IndexerConfig = IndexerConfig()
    router: RouterConfig = RouterConfig()
    mtp: MTPConfig = MTPConfig()


PLAIN = Terms(indexer=IndexerConfig(coef=0.0), mtp=MTPConfig(coef=0.0))  # the cross-entropy alone


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
    indexer: IndexerConfig = IndexerConfig()
    router: RouterConfig = RouterConfig()
    mtp: MTPConfig = MTPConfig()
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

    @property
    def terms(self) -> Terms:
        return Terms(indexer=self.indexer, router=self.router, mtp=self.mtp)

    @property
    def mtp_depths(self) -> int:
        """How many depths of multi-token prediction are trained."""
        return self.model.mtp_depths if self.mtp.coef else 0

    @property
    def evaluated(self) -> Terms:
        """The cross-entropy alone, of the attention that is trained."""
        return replace(PLAIN, indexer=replace(self.indexer, coef=0.0))


def refuse(run: RunConfig) -> None:
    """Raise ConfigError that names every setting that cannot be run, with the equation spelled out."""
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
    need(optim.warmup_steps >= 0, f"optim.warmup-steps ({optim.warmup_steps}) must be at least 0")
    if optim.schedule != "constant":
        need(0 <= optim.min_lr <= optim.lr, f"optim.min-lr ({optim.min_lr}) must be from 0 to optim.lr ({optim.lr})")
        need(
            optim.decay_steps > optim.warmup_steps,
            f"optim.decay-steps ({optim.decay_steps}) must be above optim.warmup-steps ({optim.warmup_steps})",
        )
    for name in ("beta1", "beta2"):
        value = getattr(optim, name)
        need(0 <= value < 1, f"optim.{name} ({value}) must be at least 0 and below 1")
    need(0 < optim.eps < float("inf"), f"optim.eps ({optim.eps}) must be finite and above 0")
    for name in ("weight_decay", "clip"):
        value = getattr(optim, name)
        need(0 <= value < float("inf"), f"optim.{name.replace('_', '-')} ({value}) must be finite and at least 0")
    for name in ("indexer.coef", "router.bias_rate", "router.balance_coef", "router.z_coef", "mtp.coef"):
        group, field = name.split(".")
        value = getattr(getattr(run, group), field)
        need(0 <= value < float("inf"), f"{name.replace('_', '-')} ({value}) must be finite and at least 0")
    need(
        run.indexer.stage == "frozen" or run.model.index_topk > 0,
        f"indexer.stage ({run.indexer.stage}) must be frozen: the model has no indexer (index_topk is 0)",
    )
    need(
        run.indexer.stage == "frozen" or run.indexer.coef > 0,
        f"indexer.coef ({run.indexer.coef}) must be above 0: nothing else trains the indexers",
    )
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


def idle(run: RunConfig) -> dict[str, str]:
    """The settings that change nothing beside the others, each with what makes it so."""
    data, optim, path = run.data, run.optim, run.data.path or ""
    table = {
        "optim.name is sgd": (optim.name == "sgd", "optim.beta1 optim.beta2 optim.eps"),
        "optim.schedule is constant": (optim.schedule == "constant", "optim.min_lr optim.decay_steps"),
        "data.path is no .jsonl": (not path.endswith(".jsonl"), "data.field"),
        "data.path holds fixed batches": (path.endswith(".safetensors"), "data.tokenizer data.held_out eval_every"),
        "data.held-out is 0": (data.held_out == 0, "eval_every"),
        "the model has no experts": (
            not run.model.n_routed_experts,
            "router.bias_rate router.balance_coef router.z_coef",
        ),
        "no layer of the model shares keys": ("shared" not in run.model.indexers, "indexer.teacher"),
        "indexer.stage is frozen": (run.indexer.stage == "frozen", "indexer.coef indexer.teacher"),
        "indexer.stage is dense-warmup": (
            run.indexer.stage == "dense-warmup",
            "router.bias_rate router.balance_coef router.z_coef mtp.share_indices mtp.detach_trunk mtp.detach_head",
        ),
        "the model selects no keys": (not run.model.index_topk, "mtp.share_indices"),
        "the model predicts one further token": (run.model.mtp_depths == 1, "mtp.share_indices"),
        "mtp.coef is 0": (run.mtp.coef == 0, "mtp.share_indices mtp.detach_trunk mtp.detach_head"),
        "the model predicts no further tokens": (
            not run.model.mtp_depths,
            "mtp.coef mtp.share_indices mtp.detach_trunk mtp.detach_head",
        ),
    }
    return {name: why for why, (holds, names) in table.items() if holds for name in names.split()}


def dump(run: RunConfig) -> str:
    """The resolved settings as YAML text; `load` reads them back equal."""
    return yaml.safe_dump(plain(dataclasses.asdict(run)), sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> RunConfig:
    """Read a `config.yaml`. Raises ConfigError that names the file and the unknown, missing or mistyped setting."""
    try:
        return build(RunConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error


def differences(old: str, new: str) -> dict[str, str]:
    """What differs between two `config.yaml` texts: the dotted name of a setting -> `was -> is`."""
    was, now = (flatten(yaml.safe_load(text)) for text in (old, new))
    return {name: f"{was.get(name)} -> {now.get(name)}" for name in was | now if was.get(name) != now.get(name)}
