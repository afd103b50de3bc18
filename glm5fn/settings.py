"""Every setting of a run as frozen dataclasses, what of it is refused, and its file `config.yaml`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from tyro.conf import Fixed, arg  # Fixed: a setting that has no flag

from .config import ModelConfig
from .tree import flatten
from .typed import ConfigError, build

CONFIG = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Placements as names: mesh axis -> the tensor axes that it may split, best first (see `spec.split_dims`).

    store: how parameters and moments rest. A block gets them whole along fsdp and rest, which come first in their
    meshes, and along the other axes as they rest.
    """

    store: Mapping[str, tuple[str, ...]]


# The tensor axes that may be cut to store a part on each rank, those of which each rank computes a part, and what rests
# so.
WIDE = ("embed", "q_rank", "kv_rank")
HEADS = ("heads", "kv_heads", "ffn", "shared_ffn", "expert_ffn", "vocab")
FSDP = Layout(store={"fsdp": WIDE, "ep": ("expert",), "rest": WIDE, "tp": HEADS})


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Ranks of each kind; the product of all but ep is the number of processes."""

    dp_replicate: int = 1  # whole copies of the state
    dp_shard: int = 1  # parts that one copy of the state is cut into, with rows of their own
    cp: int = 1  # ranks that share rows; each copy of the state is cut over them too
    tp: int = 1  # ranks that share the heads, hidden dims and vocabulary of a block, and the rows that it computes
    ep: int = 1  # parts that the experts of a layer are split into; divides dp_shard x cp
    cp_split: Literal["balanced", "contiguous"] = "balanced"  # a rank's part of a row: of both its ends, or one piece
    tp_experts: Literal["tokens", "ffn"] = "tokens"  # what tp splits of experts: who asks them, or their hidden dim

    @property
    def world(self) -> int:
        return self.data_ranks * self.cp * self.tp

    @property
    def dense(self) -> dict[str, int]:
        """The mesh of rows without an expert axis."""
        return {"fsdp": self.dp_shard * self.cp, "replicate": self.dp_replicate, "tp": self.tp}

    @property
    def expert(self) -> dict[str, int]:
        """The mesh of rows with one. Where tp splits tokens, experts rest on its ranks as on any others."""
        inside = self.tp if self.tp_experts == "ffn" else 1
        rest = self.dp_shard * self.cp * self.tp // inside // self.ep
        return {"rest": rest, "ep": self.ep, "replicate": self.dp_replicate, "tp": inside}

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them that share rows, with rows of their own."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how many samples make a step."""

    path: tuple[str, ...] = ()  # texts, conversations, token shards, fixed batches; none: the text of Python's own help
    weights: tuple[float, ...] = ()  # how often a sample is of each path; none: as often as there are samples in it
    kind: Literal["text", "chat"] = "text"  # chat: rows with messages, of which the assistant's are learned
    field: str = "text"  # the key of a row that holds the text
    tokenizer: str = "bytes"  # "bytes", a tokenizer.json, or a Hugging Face directory with one
    template: str | None = None  # the Jinja template of chats; none: the one beside the tokenizer
    control_tokens: bool = False  # what reads like a control token in a text is one
    skip_bad: bool = False  # leave out rows that cannot be read, and tell how many, instead of stopping
    packing: Literal["stream", "concatenate", "best-fit"] = (
        "stream"  # concatenate keeps documents apart, best-fit whole
    )
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
    """When and how training state is saved, and which saves stay."""

    every: int = 0  # steps between saves; 0 saves at the end only
    keep: int = 2  # complete checkpoints that stay, the newest
    keep_every: int = 0  # those of steps that are multiples of it stay too; 0 for none
    store: Literal["safetensors", "tensorstore"] = "safetensors"  # whole tensors in files, or arrays by parts
    url: str = ""  # where tensorstore puts its arrays, such as gs://bucket/run; none: in the checkpoint's directory
    background: Annotated[bool, arg(name="async")] = True  # go on with training while a copy of the state is written


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
    deterministic: bool = False  # sum gradients in fp64, so that dp and ep layouts agree to the bit
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
