"""What a model directory is refused for: every defect of the key and shard contract, by file and tensor."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5fn.config import ModelConfig
from glm5fn.files import INDEX, MODEL, TensorFiles
from glm5fn.hf import load
from glm5fn.model import init_params
from glm5fn.save import save, save_hf
from glm5fn.tree import flatten
from glm5fn.typed import ConfigError

TINY = ModelConfig(
    model_type="glm4_moe",
    vocab_size=96,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Our own export in three shards."""
    directory = tmp_path_factory.mktemp("ours") / "hf"
    save_hf(directory, init_params(TINY), TINY, shard_bytes=60_000)
    assert len(list(directory.glob("*.safetensors"))) == 3
    return directory


@pytest.fixture
def broken(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "broken"))


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def same_tree(a, b):
    a, b = flatten(a), flatten(b)
    return list(a) == list(b) and all(same(a[path], b[path]) for path in a)


def stored_tensors(directory):
    files = TensorFiles.open(directory)
    return {key: files.read(key) for key in files.rows}


def edit_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(directory, key, edit):
    """Change the tensors of the file that serves `key`, and the index with them."""
    path = directory / TensorFiles.open(directory).rows[key].file
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    index = json.loads((directory / INDEX).read_text())
    served = {k: file for k, file in index["weight_map"].items() if file != path.name}
    index["weight_map"] = served | dict.fromkeys(tensors, path.name)
    (directory / INDEX).write_text(json.dumps(index))
    return path.name


def refused(directory):
    with pytest.raises(ValueError) as error:
        load(directory)
    return str(error.value)


def test_every_missing_and_unexpected_tensor_is_named(broken):
    def rename(tensors):
        for key in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
            tensors[key.replace("proj", "prj")] = tensors.pop(key)

    file = edit_tensors(broken, "model.layers.0.mlp.up_proj.weight", rename)
    message = refused(broken)
    assert "missing: model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight" in message
    for name in ("gate", "up"):
        assert f"model.layers.0.mlp.{name}_prj.weight in {file}" in message


def test_a_wrong_shape_is_named_with_both_shapes(broken):
    key = "model.layers.1.self_attn.q_proj.weight"
    file = edit_tensors(broken, key, lambda tensors: tensors.update({key: tensors[key].T.contiguous()}))
    assert f"{key} in {file} has shape (40, 96), must be (96, 40)" in refused(broken)


def test_a_missing_and_a_truncated_shard_are_named_with_their_tensors(broken):
    rows = TensorFiles.open(broken).rows
    (broken / rows["model.embed_tokens.weight"].file).unlink()
    last = broken / rows["lm_head.weight"].file
    os.truncate(last, last.stat().st_size - 100)
    message = refused(broken)
    assert f"{rows['model.embed_tokens.weight'].file} is missing" in message and "model.embed_tokens.weight" in message
    assert f"{last.name} is truncated" in message and "losing lm_head.weight" in message


def test_a_tensor_dropped_from_the_index_is_refused_by_name(broken):
    index = json.loads((broken / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (broken / INDEX).write_text(json.dumps(index))
    message = refused(broken)
    assert f"{file} has tensors that {INDEX} does not list: model.norm.weight" in message
    assert "missing: model.norm.weight" in message


def test_integers_are_refused_by_name(broken):
    key = "model.layers.0.self_attn.k_proj.weight"
    file = edit_tensors(broken, key, lambda tensors: tensors.update({key: tensors[key].int()}))
    assert f"{key} in {file} is int32, must be float64 or float32" in refused(broken)


def test_tensors_that_are_stacked_must_have_one_dtype(broken):
    key = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(broken, key, lambda tensors: tensors.update({key: tensors[key].bfloat16()}))
    assert f"{key} must have one dtype, have bfloat16, float32" in refused(broken)


def test_a_head_is_needed_exactly_when_the_model_is_not_tied(broken):
    edit_config(broken, tie_word_embeddings=True)
    assert "lm_head.weight" in refused(broken)  # there is one, and it differs

    embed = stored_tensors(broken)["model.embed_tokens.weight"]
    edit_tensors(broken, "lm_head.weight", lambda tensors: tensors.update({"lm_head.weight": embed.bfloat16()}))
    assert "differs from model.embed_tokens.weight" in refused(broken)
    edit_tensors(broken, "lm_head.weight", lambda tensors: tensors.update({"lm_head.weight": embed}))
    _, params = load(broken)
    assert "head" not in params and same(params["embed"], embed)

    edit_tensors(broken, "lm_head.weight", lambda tensors: tensors.pop("lm_head.weight"))
    assert same_tree(load(broken)[1], params)
    edit_config(broken, tie_word_embeddings=False)
    assert "missing: lm_head.weight" in refused(broken)


def test_rotary_buffers_of_older_checkpoints_are_ignored(broken, exported):
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(broken, "model.norm.weight", lambda tensors: tensors.update({key: torch.zeros(4)}))
    assert same_tree(load(broken)[1], load(exported)[1])


def test_a_native_directory_is_held_to_the_same_contract(tmp_path):
    save(tmp_path / "x", init_params(TINY), TINY)
    tensors = load_file(tmp_path / "x" / MODEL)
    tensors["lm_head.weight"] = tensors.pop("head")
    save_file(tensors, tmp_path / "x" / MODEL)
    message = refused(tmp_path / "x")
    assert "missing: head" in message and f"unexpected: lm_head.weight in {MODEL}" in message


def test_a_directory_without_a_config_or_without_tensors_is_refused(exported, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path)
    shutil.copy(exported / "config.json", tmp_path)
    assert str(tmp_path) in refused(tmp_path)
