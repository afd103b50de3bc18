"""The model as a frozen dataclass by its Hugging Face names, and values built from files with their types checked."""

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from tyro.conf import Fixed  # a setting that has no flag

ModelType = Literal["glm5_dense", "glm", "glm4", "glm4_moe"]

# What transformers takes for a key that config.json leaves out. A key that is in neither place is an error.
ABSENT: dict[str, dict[str, Any]] = {
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {"attention_bias": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    "glm5_dense": {},
}
ARCHITECTURES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}


class ConfigError(ValueError):
    """A setting that cannot be run; the command line answers it with exit code 2."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's architecture. The fields bear their names in Hugging Face's `config.json`."""

    model_type: Fixed[ModelType]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    use_qk_norm: bool = False
    partial_rotary_factor: float = 1.0
    rope_theta: float = 1e4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()  # the first one also ends each document of training text
    pad_token_id: int | None = None
    extra: Fixed[Mapping[str, Any]] = field(default_factory=dict)  # keys of config.json that are only carried along

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not 1 <= value < 1 << 31:
                raise ConfigError(f"{name} ({value}) must be at least 1, and below 2**31")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.use_qk_norm and self.model_type in ("glm", "glm4"):
            raise ConfigError(f"use_qk_norm must be false: {self.model_type} has no such norm")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ConfigError(
                f"pad_token_id ({self.pad_token_id}) must be from 0 to vocab_size ({self.vocab_size}) - 1"
            )
        if min(self.eos_token_id, default=0) < 0:
            raise ConfigError(f"eos_token_id ({min(self.eos_token_id)}) must not be negative")
        for name in ("partial_rotary_factor", "rope_theta", "rms_norm_eps", "initializer_range"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} ({getattr(self, name)}) must be finite and above 0")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor ({self.partial_rotary_factor}) x head_dim ({self.head_dim}) = "
                f"{self.rotary_dim} rotary dims: must be even, above 0 and at most head_dim"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

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
    def dims(self) -> dict[str, int]:
        """The size of each axis that a parameter row may name."""
        return {
            "vocab": self.vocab_size,
            "embed": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "ffn": self.intermediate_size,
            "pair": 2,  # gate and up
        }

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """Read a `config.json`: a dict, its path, or the path of its directory.

        Raises ConfigError for what the model would silently get wrong: an unknown `model_type`, activation or RoPE
        scaling, two different thetas, MoE layers. Keys that are not read are kept in `extra`.
        """
        if not isinstance(source, Mapping):
            path = Path(source)
            try:
                path = path / "config.json" if path.is_dir() else path
                source = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read as a model's config.json ({error})") from error
            if not isinstance(source, Mapping):
                raise ConfigError(f"{path}: must be a JSON object, is {type(source).__name__}")
        keys = {key: value for key, value in source.items() if value is not None}  # null is as good as absent
        model_type = keys.get("model_type")
        if model_type not in tuple(ABSENT):
            raise ConfigError(f"model_type ({model_type!r}) must be one of {', '.join(sorted(ABSENT))}")
        if keys.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act ({keys['hidden_act']!r}) must be 'silu'")
        rope = read_rope(keys)
        if model_type == "glm4_moe":
            read = {"first_k_dense_replace": 1, "num_hidden_layers": 0} | keys
            dense, layers = (build(int, read[name], name) for name in ("first_k_dense_replace", "num_hidden_layers"))
            if dense < layers:
                raise ConfigError(f"layers {dense}-{layers - 1} are MoE: first_k_dense_replace must be {layers}")
        eos = keys.get("eos_token_id", ())
        keys["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        hidden, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
        split: dict[str, Any] = (
            {"head_dim": hidden // heads} if isinstance(hidden, int) and isinstance(heads, int) and heads else {}
        )
        keys = split | ABSENT[model_type] | keys | rope
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "extra"}
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in keys]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        unread = {k: v for k, v in keys.items() if k not in known and k not in WRITTEN}
        return build(cls, {k: v for k, v in keys.items() if k in known} | {"extra": unread})

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model; `from_hf` reads it back equal."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        eos = list(self.eos_token_id)
        own["eos_token_id"] = eos if len(eos) > 1 else eos[0] if eos else None
        rope = {"rope_type": "default"} | {key: own[key] for key in ("rope_theta", "partial_rotary_factor")}
        written = {"hidden_act": "silu", "rope_parameters": rope}
        if self.model_type in ARCHITECTURES:
            written["architectures"] = [ARCHITECTURES[self.model_type]]
        if self.model_type == "glm4_moe":
            written |= {"first_k_dense_replace": self.num_hidden_layers, "num_nextn_predict_layers": 0}
        return {**self.extra, **own, **written}


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Keys that to_hf writes itself, so `extra` need not carry them.
WRITTEN = (
    "architectures",
    "dtype",
    "first_k_dense_replace",
    "format",
    "hidden_act",
    "num_nextn_predict_layers",
    "rope_parameters",
    "rope_scaling",
    "torch_dtype",
)


def read_rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `partial_rotary_factor`, whether they stand flat, nested, or in both places alike."""
    nested: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        nested |= build(Mapping[str, Any], keys.get(name, {}), name)
    kind = nested.pop("rope_type", nested.pop("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_type ({kind!r}) must be 'default': scaled RoPE is not supported")
    nested.pop("type", None)
    found: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        values = {build(float, v, name) for v in (keys.get(name), nested.pop(name, None)) if v is not None}
        if len(values) > 1:
            raise ConfigError(f"{name} stands twice with different values: {', '.join(map(str, sorted(values)))}")
        if values:
            found[name] = values.pop()
    if nested:
        raise ConfigError(f"rope_parameters has keys that are not supported: {', '.join(sorted(nested))}")
    return found


def build(kind: Any, value: Any, name: str = "") -> Any:
    """Make a value of a type from what YAML or JSON gave; name: of the setting, with a dot after it."""
    origin, args, label = typing.get_origin(kind), typing.get_args(kind), name.removesuffix(".")
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{label or 'the file'} must be a mapping of settings, is {value!r}")
        types = typing.get_type_hints(kind)
        for key in value:
            if key not in types:
                near = difflib.get_close_matches(str(key), types, 1)
                raise ConfigError(f"{name}{key} is no setting" + (f": did you mean {near[0]}?" if near else ""))
        needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [f"{name}{key}" for key in needed if key not in value]:
            raise ConfigError(f"{', '.join(missing)} must be set")
        return kind(**{key: build(types[key], item, f"{name}{key}.") for key, item in value.items()})
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{label} ({value!r}) must be one of {', '.join(map(str, args))}")
    if origin is UnionType:
        return None if value is None and NoneType in args else build(args[0], value, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(build(args[0], item, name) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: build(args[1], item, f"{name}{key}.") for key, item in value.items()}
    if kind is float and type(value) in (int, str):  # YAML takes 1e-4 for text
        with suppress(ValueError, OverflowError):
            return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise ConfigError(f"{label} ({value!r}) must be of type {getattr(kind, '__name__', kind)}")
