"""What a model is made of: its sizes by their Hugging Face names, what follows from them, and what cannot be."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tyro.conf import Fixed  # a setting that has no flag

from .typed import ConfigError

ModelType = Literal["glm5_dense", "glm", "glm4", "glm4_moe", "glm_moe_dsa"]
Indexer = Literal["full", "shared"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model's architecture. The fields bear their names in Hugging Face's `config.json`.

    One config serves all: attention is `gqa` or `mla`; with `index_topk` each layer of an `mla` model attends to that
    many selected keys; with `n_routed_experts` all layers but the first are MoE; with `num_nextn_predict_layers` the
    model predicts further tokens ahead.
    """

    model_type: Fixed[ModelType]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    attention: Fixed[Literal["gqa", "mla"]] = "gqa"
    # Grouped-query attention.
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False
    use_qk_norm: bool = False
    partial_rotary_factor: float = 1.0
    # Multi-head latent attention.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    latent_norm_eps: float = 1e-6
    # Sparse attention: a layer selects keys by its own indexer (full), or takes those of the last that did (shared).
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    indexer_types: tuple[Indexer, ...] = ()  # of each layer, instead of the schedule that freq and offset give
    # Mixture of experts.
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    n_shared_experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    # Multi-token prediction.
    num_nextn_predict_layers: int = 0  # weight sets
    num_mtp_depths: int = 0  # tokens that are predicted beyond the next one; by default one for each weight set
    rope_theta: float = 1e4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()  # the first one also ends each document of training text
    pad_token_id: int | None = None
    # Keys of config.json that are only carried along.
    extra: Fixed[Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if problems := list(faults(self)):
            raise ConfigError("; ".join(problems))

    @property
    def rotary_dim(self) -> int:
        """How many dims of a head, of queries and keys, RoPE turns."""
        return self.qk_rope_head_dim if self.attention == "mla" else int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope_interleaved(self) -> bool:
        """Whether RoPE turns adjacent pairs; else half-split ones."""
        return self.model_type != "glm4_moe"

    @property
    def post_norms(self) -> bool:
        """Whether each branch is normed again before it is added (the four-norm sandwich of GLM-4-0414)."""
        return self.model_type == "glm4"

    @property
    def fused_gate_up(self) -> bool:
        """Whether Hugging Face stores gate and up projection as one tensor, gate first."""
        return self.model_type in ("glm", "glm4")

    @property
    def indexers(self) -> tuple[Indexer, ...]:
        """How each layer comes by the keys that it attends to; empty if it attends to all."""
        if not self.index_topk:
            return ()
        return self.indexer_types or index_schedule(
            self.num_hidden_layers, self.index_topk_freq, self.index_skip_topk_offset
        )

    @property
    def mtp_depths(self) -> int:
        return self.num_mtp_depths or self.num_nextn_predict_layers

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts; the layers of multi-token prediction stand behind the last."""
        return bool(self.n_routed_experts) and layer >= min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each axis that a parameter row may name."""
        return {
            "vocab": self.vocab_size,
            "embed": self.hidden_size,
            "two_embeds": 2 * self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "q_rank": self.q_lora_rank,
            "kv_rank": self.kv_lora_rank,
            "kv_rank_rope": self.kv_lora_rank + self.qk_rope_head_dim,
            "qk_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "nope_v_dim": self.qk_nope_head_dim + self.v_head_dim,
            "v_dim": self.v_head_dim,
            "index_heads": self.index_n_heads,
            "index_dim": self.index_head_dim,
            "ffn": self.intermediate_size,
            "route": self.n_routed_experts,
            "expert": self.n_routed_experts,
            "expert_ffn": self.moe_intermediate_size,
            "shared_ffn": self.moe_intermediate_size * self.n_shared_experts,
            "pair": 2,  # gate and up
        }


def index_schedule(layers: int, freq: int, offset: int) -> tuple[Indexer, ...]:
    """Which layers select keys by an indexer of their own: the first `offset`, the last of them counting as the first
    of every `freq`-th.

    >>> [i for i, kind in enumerate(index_schedule(12, freq=4, offset=3)) if kind == "full"]
    [0, 1, 2, 6, 10]
    """
    return tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers))


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
PARTS = {  # the sizes that a model needs if it has the part
    "gqa": ("num_key_value_heads", "head_dim"),
    "mla": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "dsa": ("index_topk", "index_n_heads", "index_head_dim", "index_topk_freq"),
    "dense": ("intermediate_size",),
    "moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"),
}


def faults(cfg: Architecture) -> Iterator[str]:
    """What is wrong with an architecture, each with what it must be."""
    wrong = list(value_faults(cfg))
    yield from wrong
    if not wrong:  # the others count with these numbers
        for find in (family_faults, attention_faults, indexer_faults, expert_faults):
            yield from find(cfg)


def value_faults(cfg: Architecture) -> Iterator[str]:
    has = {
        "gqa": cfg.attention == "gqa",
        "mla": cfg.attention == "mla",
        "dsa": cfg.index_topk > 0,
        "dense": not cfg.n_routed_experts or cfg.first_k_dense_replace > 0,
        "moe": cfg.n_routed_experts > 0,
    }
    needed = [*SIZES, *(name for part, names in PARTS.items() if has[part] for name in names)]
    for this in dataclasses.fields(cfg):
        name, value = this.name, getattr(cfg, this.name)
        if this.type is int and not (name in needed) <= value < 1 << 31:
            yield f"{name} ({value}) must be at least {int(name in needed)}, and below 2**31"
        if this.type is float and not 0 < value < float("inf"):
            yield f"{name} ({value}) must be finite and above 0"
    if cfg.pad_token_id is not None and not 0 <= cfg.pad_token_id < cfg.vocab_size:
        yield f"pad_token_id ({cfg.pad_token_id}) must be from 0 to vocab_size ({cfg.vocab_size}) - 1"
    if min(cfg.eos_token_id, default=0) < 0:
        yield f"eos_token_id ({min(cfg.eos_token_id)}) must not be negative"


def family_faults(cfg: Architecture) -> Iterator[str]:
    kind = {"glm": "gqa", "glm4": "gqa", "glm4_moe": "gqa", "glm_moe_dsa": "mla"}.get(cfg.model_type, cfg.attention)
    if kind != cfg.attention:
        yield f"attention ({cfg.attention}) must be {kind}: {cfg.model_type} has no other"
    if cfg.model_type in ("glm", "glm4") and (cfg.use_qk_norm or cfg.n_routed_experts or cfg.num_nextn_predict_layers):
        yield f"use_qk_norm, n_routed_experts and num_nextn_predict_layers must be off: {cfg.model_type} lacks them"
    if cfg.model_type == "glm_moe_dsa":
        if not (cfg.index_topk and cfg.n_routed_experts):
            yield "index_topk and n_routed_experts must be above 0: glm_moe_dsa has both"
        if cfg.head_dim or cfg.num_key_value_heads or cfg.partial_rotary_factor != 1:
            yield (
                f"head_dim ({cfg.head_dim}) and num_key_value_heads ({cfg.num_key_value_heads}) must be 0, and "
                f"partial_rotary_factor ({cfg.partial_rotary_factor}) 1: glm_moe_dsa has none of them"
            )
    sets, depths = cfg.num_nextn_predict_layers, cfg.num_mtp_depths
    if depths > sets != 1:
        yield (
            f"num_mtp_depths ({depths}) must be at most num_nextn_predict_layers ({sets}), unless that is 1: "
            "one weight set can serve all depths, several serve one each"
        )


def attention_faults(cfg: Architecture) -> Iterator[str]:
    if cfg.attention == "mla":
        if cfg.attention_bias or cfg.use_qk_norm:
            yield "attention_bias and use_qk_norm must be false: latent attention (mla) has neither"
        if cfg.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim ({cfg.qk_rope_head_dim}) must be even: RoPE turns pairs"
        return
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        yield (
            f"num_attention_heads ({cfg.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({cfg.num_key_value_heads})"
        )
    if cfg.rotary_dim % 2 or not 0 < cfg.rotary_dim <= cfg.head_dim:
        yield (
            f"partial_rotary_factor ({cfg.partial_rotary_factor}) x head_dim ({cfg.head_dim}) = "
            f"{cfg.rotary_dim} rotary dims: must be even, above 0 and at most head_dim"
        )


def indexer_faults(cfg: Architecture) -> Iterator[str]:
    if not cfg.index_topk:
        if cfg.indexer_types:
            yield "indexer_types must be empty without index_topk: there is nothing to select"
        return
    if cfg.attention == "gqa":
        yield f"index_topk ({cfg.index_topk}) must be 0: keys are selected in latent attention (mla) only"
    if cfg.index_head_dim < cfg.qk_rope_head_dim:
        yield (
            f"index_head_dim ({cfg.index_head_dim}) must be at least qk_rope_head_dim ({cfg.qk_rope_head_dim}), "
            "which RoPE turns of it"
        )
    listed, layers = len(cfg.indexers), cfg.num_hidden_layers
    if listed != layers:
        yield (
            f"indexer_types has {listed} entries, must have one for each of the {layers} layers (num_hidden_layers): "
            + (f"layer {listed} has none" if listed < layers else f"there is no layer {layers}")
        )
    if cfg.indexers[:1] == ("shared",):
        yield "layer 0 must have an indexer (full), is shared: there is none before it whose keys it could take"
    if cfg.indexer_types and (cfg.index_topk_freq, cfg.index_skip_topk_offset) != (1, 2):
        yield (
            f"index_topk_freq ({cfg.index_topk_freq}) must be 1 and index_skip_topk_offset "
            f"({cfg.index_skip_topk_offset}) 2 beside indexer_types, which decides: leave out one or the other"
        )


def expert_faults(cfg: Architecture) -> Iterator[str]:
    experts, groups = cfg.n_routed_experts, cfg.n_group
    if not experts:
        if cfg.first_k_dense_replace:
            yield f"first_k_dense_replace ({cfg.first_k_dense_replace}) must be 0 without n_routed_experts"
        return
    if cfg.num_experts_per_tok > experts // groups * cfg.topk_group:
        yield (
            f"num_experts_per_tok ({cfg.num_experts_per_tok}) must be at most n_routed_experts ({experts}) / "
            f"n_group ({groups}) x topk_group ({cfg.topk_group})"
        )
    if experts % groups or cfg.topk_group > groups:
        yield (
            f"n_group ({groups}) must divide n_routed_experts ({experts}), and be at least "
            f"topk_group ({cfg.topk_group})"
        )
    if groups > 1 and experts // groups < 2:
        yield f"n_group ({groups}) must leave two experts of {experts} to each group"
