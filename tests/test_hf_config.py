import dataclasses
import json

import pytest
from transformers import AutoConfig

from glm5fn.config import ModelConfig
from glm5fn.hf import load
from glm5fn.model import init_params
from glm5fn.save import save_hf
from glm5fn.typed import ConfigError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
    "eos_token_id": [2, 3, 5],
}
THETA = {
    "flat": {"rope_theta": 5e5},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "both alike": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
}
FACTOR = {
    "top": ({"partial_rotary_factor": 0.25}, 0.25),
    "nested": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 0.25),
    "absent": ({}, 0.5),
}


def round_trip(keys, tmp_path):
    """Our reading, after checks that our writing is read back equal, by us and by transformers."""
    cfg = ModelConfig.from_hf(keys)
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg
    seen = []
    for name, config in (("theirs", keys), ("ours", cfg.to_hf())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        seen.append(AutoConfig.from_pretrained(tmp_path / name))
    for name in (*SIZES, "attention_bias", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act"):
        assert getattr(seen[0], name) == getattr(seen[1], name), name
    assert cfg.rope_theta == seen[0].rope_parameters["rope_theta"]
    assert cfg.partial_rotary_factor == seen[0].rope_parameters["partial_rotary_factor"]
    return cfg


@pytest.mark.parametrize("model_type", ["glm", "glm4", "glm4_moe"])
@pytest.mark.parametrize("spelling", THETA)
def test_theta_is_the_same_flat_or_nested(tmp_path, model_type, spelling):
    keys = {"model_type": model_type, "first_k_dense_replace": 2, **SIZES}
    assert round_trip(keys | THETA[spelling], tmp_path).rope_theta == 5e5


@pytest.mark.parametrize("model_type", ["glm", "glm4", "glm4_moe"])
@pytest.mark.parametrize("spelling", FACTOR)
def test_the_rotary_factor_is_found_wherever_it_stands(tmp_path, model_type, spelling):
    more, factor = FACTOR[spelling]
    cfg = round_trip({"model_type": model_type, "first_k_dense_replace": 2, **SIZES, **more}, tmp_path)
    assert cfg.partial_rotary_factor == factor and cfg.rotary_dim == 16 * factor


@pytest.mark.parametrize("eos", [7, [7], [7, 8], None])
def test_eos_ids_come_as_a_number_a_list_or_null(tmp_path, eos):
    keys = {"model_type": "glm4", **SIZES, "eos_token_id": eos}
    cfg = ModelConfig.from_hf(keys)
    assert cfg.eos_token_id == ({7: (7,), None: ()}[eos] if not isinstance(eos, list) else tuple(eos))
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize(
    "more, named",
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "invented"}}, "invented"),
        ({"model_type": "glm4_moe_lite"}, "glm4_moe_lite"),
    ],
)
def test_a_config_that_would_turn_otherwise_is_refused_by_name(more, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf({"model_type": "glm4", **SIZES, **more})


@pytest.mark.parametrize("name", ["rope_parameters", "rope_theta", "first_k_dense_replace", "model_type"])
@pytest.mark.parametrize("value", ["x", True, [[2]]], ids=str)
def test_a_key_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_hf({"model_type": "glm4_moe", "first_k_dense_replace": 2, **SIZES, name: value})


def test_null_is_as_good_as_absent():
    keys = {"model_type": "glm4_moe", "num_hidden_layers": 1, **{k: v for k, v in SIZES.items() if "layers" not in k}}
    nulls = dict.fromkeys(("first_k_dense_replace", "rope_parameters", "rope_theta", "attention_bias", "novel"))
    assert ModelConfig.from_hf(keys | nulls) == ModelConfig.from_hf(keys)


def test_unknown_keys_are_kept_for_the_export(tmp_path):
    cfg = ModelConfig.from_hf({"model_type": "glm4", **SIZES, "use_cache": False, "novel": [1]})
    save_hf(tmp_path / "x", init_params(cfg), cfg)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["novel"] == [1] and config["use_cache"] is False and config["torch_dtype"] == "float32"
    assert dataclasses.asdict(load(tmp_path / "x")[0]) == dataclasses.asdict(cfg)
