"""The published checkpoints, key for key, as sparse files: headers are real, and the data of a few tensors."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from test_convert import run  # noqa: F401

from configs import MODELS
from glm5fn.files import DTYPES, INDEX
from glm5fn.hf import open_model
from glm5fn.tree import flatten

LISTS = {"glm4-9b": "glm4-9b", "glm4-32b": "glm4-32b", "glm5": "glm5-744b", "glm5.2": "glm5.2-744b"}
LISTS["glm5.2-fp8"] = "glm5.2-744b"
SHARD = 1000  # tensors


def published(directory, name):
    """A directory of the list's keys in shards, without data: the shards, and where each tensor stands in them."""
    listing = gzip.decompress((Path(__file__).parent / "keys" / f"{name}.tsv.gz").read_bytes()).decode()
    lines = [line.split("\t") for line in listing.splitlines()]
    places, served = {}, {}
    for number, first in enumerate(range(0, len(lines), SHARD)):
        file, header, end = directory / f"model-{number:05}.safetensors", {}, 0
        for key, dtype, size in lines[first : first + SHARD]:
            start, end = end, end + math.prod(json.loads(size)) * DTYPES[dtype].itemsize
            header[key] = {"dtype": dtype, "shape": json.loads(size), "data_offsets": [start, end]}
            served[key] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        places |= {key: (file, 8 + len(text) + entry["data_offsets"][0]) for key, entry in header.items()}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": served}))
    config = MODELS[LISTS[name]].to_hf()
    if name.endswith("fp8"):
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return places


def fill(place, tensor):
    file, start = place
    with file.open("r+b") as out:
        out.seek(start)
        out.write(tensor.flatten().view(torch.uint8).numpy().tobytes())


EACH = [pytest.param(name, marks=pytest.mark.slow if name.startswith("glm5") else ()) for name in LISTS]


@pytest.mark.parametrize("name", EACH)
def test_a_published_list_maps_with_nothing_missing_or_unexpected(tmp_path, run, name):  # noqa: F811
    places = published(tmp_path, name)
    code, said = run("inspect", tmp_path)
    assert code == 0 and "nothing missing, nothing unexpected" in said and "notice" not in said
    total = {"glm5": "743,911,199,232", "glm5.2": "743,377,000,704", "glm5.2-fp8": "743,377,000,704"}
    assert f"parameters {total.get(name, '')}" in said
    cfg, stored = open_model(tmp_path)
    leaves = flatten(stored)
    assert cfg == MODELS[LISTS[name]]
    norm = torch.randn(MODELS[LISTS[name]].hidden_size).bfloat16()
    fill(places["model.layers.10.input_layernorm.weight"], norm)
    assert torch.equal(leaves["layers.10.attn_norm"].read(), norm)
    if name.startswith("glm5"):
        experts, bias = leaves["layers.10.ffn.experts.gate_up"], torch.arange(256) / 7
        fill(places["model.layers.10.mlp.gate.e_score_correction_bias"], bias)
        assert torch.equal(leaves["layers.10.ffn.router_bias"].read(), bias)
        key, rows = "model.layers.10.mlp.experts.201.up_proj.weight", torch.randn(3, 6144)
        if name.endswith("fp8"):
            scales = torch.rand(16, 48)
            rows = rows.to(torch.float8_e4m3fn)
            fill(places[f"{key}_scale_inv"], scales)
            expected = (rows.double() * scales[0].double().repeat_interleave(128)).bfloat16()
        else:
            rows = expected = rows.bfloat16()
        fill(places[key], rows)
        assert torch.equal(experts.read(((201, 1), (1, 1), (0, 3), (0, 6144)))[0, 0], expected)
        assert not experts.read(((201, 1), (0, 1), (0, 3), (0, 6144))).any()
