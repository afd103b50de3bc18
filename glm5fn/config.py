"""The model's config, read from and written to Hugging Face's `config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import legacy
from .architecture import Architecture, index_schedule
from .typed import ConfigError, build

EXPERTS = {"num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
# What transformers takes for a key that config.json leaves out. A key that is in neither place is an error.
ABSENT: dict[str, dict[str, Any]] = {
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
        **EXPERTS,
    },
    "glm_moe_dsa": {
        "attention": "mla",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        **EXPERTS,
    },
    "glm5_dense": {},
}
ARCHITECTURES = {
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}
# Written whatever they are. Besides these, to_hf writes what transformers has a default of its own for, and what
# differs from ours: so the parts that a model lacks leave no trace in its file.
ALWAYS = (
    *("max_position_embeddings", "rms_norm_eps", "initializer_range", "rope_theta"),
    *("tie_word_embeddings", "eos_token_id", "pad_token_id"),
)
ALWAYS_GQA = ("num_key_value_heads", "head_dim", "attention_bias", "partial_rotary_factor")
# Keys that to_hf writes itself or that from_hf has turned into others, so `extra` need not carry them.
WRITTEN = (
    *("architectures", "dtype", "format", "hidden_act", "index_topk_pattern", "mlp_layer_types", "rope_parameters"),
    *("quantization_config", "rope_scaling", "scoring_func", "topk_method", "torch_dtype"),
)
SYNONYMS = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
ONLY = {  # key -> the one value that this model computes
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "indexer_rope_interleave": True,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """An architecture that is read from a `config.json`, and written to one."""

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """Read a `config.json`: a dict, its path, or the path of its directory.

        Raises ConfigError for what the model would silently get wrong: an unknown `model_type`, activation, routing or
        RoPE scaling, two keys that contradict each other, a layer of a kind that it cannot have. Keys that are not
        read are kept in `extra`.
        """
        source = source if isinstance(source, Mapping) else read_json(Path(source))
        keys = {key: value for key, value in source.items() if value is not None}  # null is as good as absent
        if not isinstance(keys.get("model_type"), str):
            raise ConfigError(f"model_type ({keys.get('model_type')!r}) must be the name of a family")
        if keys.get("model_type") == legacy.MODEL_TYPE:
            keys = legacy.modern(keys)
        model_type = keys.get("model_type")
        if model_type not in tuple(ABSENT):
            known = ", ".join([*sorted(ABSENT), legacy.MODEL_TYPE])
            raise ConfigError(f"model_type ({model_type!r}) must be one of {known}")
        for name, value in (ONLY | {"rope_interleave": model_type != "glm4_moe"}).items():
            if keys.get(name, value) != value:
                raise ConfigError(f"{name} ({keys[name]!r}) must be {value!r}: nothing else is supported")
        keys = {**keys, **read_synonyms(keys)}
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "extra"}
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in keys]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        used = {*WRITTEN, *SYNONYMS}
        read = read_rope(keys) | read_mlp_types(keys) | read_indexer_types(keys)
        if model_type == "glm_moe_dsa":
            # Their head_dim is not that of our heads: released configs hold a number that nothing is to be sized by.
            known = {name: field for name, field in known.items() if name not in ("head_dim", "num_key_value_heads")}
            used |= {"num_key_value_heads", "layer_types"}  # both follow from other keys
        eos = keys.get("eos_token_id", ())
        read["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
        gqa = {**ABSENT[model_type], **keys}.get("attention", "gqa") == "gqa"
        split = gqa and isinstance(hidden, int) and isinstance(heads, int) and heads > 0
        keys = ({"head_dim": hidden // heads} if split else {}) | ABSENT[model_type] | keys | read
        if not keys.get("n_routed_experts"):
            keys["first_k_dense_replace"] = 0
        unread = {k: v for k, v in keys.items() if k not in known and k not in used}
        return build(cls, {k: v for k, v in keys.items() if k in known} | {"extra": unread})

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model; `from_hf` reads it back equal."""
        always = {*ALWAYS, *ABSENT[self.model_type], *(ALWAYS_GQA if self.attention == "gqa" else ())}
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.name != "extra"}
        own = {name: value for name, (value, default) in values.items() if value != default or name in always}
        eos = list(self.eos_token_id)
        own["eos_token_id"] = eos if len(eos) > 1 else eos[0] if eos else None
        rope = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
        own |= {"hidden_act": "silu", "rope_parameters": {"rope_type": "default"} | rope}
        if self.model_type in ARCHITECTURES:
            own["architectures"] = [ARCHITECTURES[self.model_type]]
            own.pop("attention", None)  # the type says it
        if "n_routed_experts" in own:
            own |= {name: ONLY[name] for name in ("scoring_func", "topk_method")}
        if self.model_type == "glm4_moe" and not self.n_routed_experts:
            own["first_k_dense_replace"] = self.num_hidden_layers
        if self.indexer_types:
            own["indexer_types"] = list(self.indexer_types)
        if self.model_type == "glm_moe_dsa":
            own["num_key_value_heads"] = self.num_attention_heads  # transformers repeats keys by their quotient
            layers = range(self.num_hidden_layers)
            own["mlp_layer_types"] = ["sparse" if self.is_moe(layer) else "dense" for layer in layers]
            own["indexer_types"] = list(self.indexers)
            if self.indexer_types:  # a list of its own, which freq and offset do not give
                del own["index_topk_freq"], own["index_skip_topk_offset"]
        return {**self.extra, **own}


def read_json(path: Path) -> Mapping[str, Any]:
    try:
        path = path / "config.json" if path.is_dir() else path
        source = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a model's config.json ({error})") from error
    if not isinstance(source, Mapping):
        raise ConfigError(f"{path}: must be a JSON object, is {type(source).__name__}")
    return source


def read_synonyms(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that stand under another name, under the one that is ours."""
    found: dict[str, Any] = {}
    for name, ours in SYNONYMS.items():
        if name in keys:
            given = keys.get(ours, found.get(ours, keys[name]))
            if given != keys[name]:
                raise ConfigError(f"{name} ({keys[name]}) must equal {ours} ({given}), of which it is another name")
            found[ours] = keys[name]
    return found


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


def read_mlp_types(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`first_k_dense_replace` from `mlp_layer_types`, a word for each layer; where both stand they must agree."""
    if "mlp_layer_types" not in keys:
        return {}
    words = build(tuple[str, ...], keys["mlp_layer_types"], "mlp_layer_types")
    layers = build(int, keys["num_hidden_layers"], "num_hidden_layers")
    if len(words) != layers:
        raise ConfigError(f"mlp_layer_types has {len(words)} entries, must have {layers} (num_hidden_layers)")
    dense = next((i for i, word in enumerate(words) if word != "dense"), layers)
    for i in range(dense, layers):
        if words[i] != "sparse":
            raise ConfigError(
                f"layer {i}: mlp_layer_types says {words[i]!r}, must be 'sparse': the first layers may be 'dense', "
                "all behind them are 'sparse'"
            )
    first = build(int, keys.get("first_k_dense_replace", dense), "first_k_dense_replace")
    if min(first, layers) != dense:
        raise ConfigError(
            f"first_k_dense_replace ({first}) must be {dense}, as many layers as mlp_layer_types calls dense: "
            "change or leave out one of them"
        )
    return {"first_k_dense_replace": first}


def read_indexer_types(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of the indexers, from a list of words or a pattern such as FFSS; they win over freq and offset."""
    name = "indexer_types" if "indexer_types" in keys else "index_topk_pattern"
    if name not in keys:
        return {}
    given = tuple(keys[name]) if isinstance(keys[name], str) else keys[name]
    given = build(tuple[str, ...], given, name)
    words = tuple({"F": "full", "S": "shared"}.get(word, word) for word in given)
    for i, word in enumerate(words):
        if word not in ("full", "shared"):
            raise ConfigError(f"layer {i}: {name} says {word!r}, must be 'full' or 'shared'")
    default = {"index_topk_freq": 1, "index_skip_topk_offset": 2}
    freq, offset = (build(int, keys.get(name, number), name) for name, number in default.items())
    # Released files tell the schedule twice; where both say the same, the shorter one is kept.
    twice = any(name in keys for name in default) and freq > 0
    if twice and index_schedule(len(words), freq, offset) == words:
        layers = build(int, keys["num_hidden_layers"], "num_hidden_layers")
        if len(words) == layers:
            return {"indexer_types": ()}
    return {"indexer_types": words, **default}
