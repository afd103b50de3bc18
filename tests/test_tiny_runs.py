"""Every tiny run of configs.py learns from the text that ships with Python: for a moment here, for 100 steps slowly."""

import pytest
from test_stages import SIZES
from training import fixed, train

from configs import RUNS
from glm5fn.record import read_metrics
from glm5fn.settings import load

FALL = {  # what falls in each run; where the indexers alone learn, nothing else can
    "dense-tiny": {"loss"},
    "moe-tiny": {"loss"},
    "mla-tiny": {"loss"},
    "dsa-tiny": {"loss"},
    "mtp-tiny": {"loss", "mtp_1"},
    "glm5-tiny": {"loss", "mtp_1", "mtp_2", "mtp_3"},
    "sft-tiny": {"loss", "mtp_1", "mtp_2", "mtp_3"},
    "dsa-warmup-tiny": {"kl"},
}
EACH = pytest.mark.parametrize("name", FALL)


def test_these_are_all_the_tiny_runs():
    assert FALL.keys() == {name for name in RUNS if name.endswith("-tiny")}


def shrunk(name):
    """Flags that make the model of a run small, and leave it all its parts."""
    model = RUNS[name].model
    sizes = {key.replace("-", "_"): size for key, size in SIZES.items()} | {"num_key_value_heads": 1, "head_dim": 8}
    layers = ("num_hidden_layers", "index_skip_topk_offset", "index_topk_freq", "num_mtp_depths")
    kept = {field: size for field, size in sizes.items() if getattr(model, field) and field not in layers}
    kept["num_hidden_layers"] = model.first_k_dense_replace + 2
    return [part for field, size in kept.items() for part in (f"--model.{field.replace('_', '-')}", str(size))]


def averages(records, name, ends):
    values = [record[name] for record in records]
    return sum(values[:ends]) / ends, sum(values[-ends:]) / ends


@EACH
def test_a_shrunken_one_learns_for_three_steps(name, tmp_path):
    size = ["--data.seq-len", "12", "--data.global-batch", "4", "--data.micro-batch", "2"]
    size += ["--data.kind", "text"] if RUNS[name].data.kind == "chat" else []
    flags = ["--config", name, *shrunk(name), *size, "--optim.warmup-steps", "0", "--optim.lr", "2e-3"]
    data = fixed(tmp_path / "one.safetensors", 1, 2, 3, 4)  # the same batch in each step
    assert train(*flags, "--data.path", data, "--out", tmp_path / "x", "--steps", "3") == 0
    records = read_metrics(tmp_path / "x")
    assert [record["skipped"] for record in records] == [0, 0, 0]
    for value in FALL[name]:
        assert records[2][value] < records[1][value] < records[0][value], value
    model = load(tmp_path / "x" / "config.yaml").model
    assert {kind: getattr(model, kind) > 0 for kind in ("n_routed_experts", "index_topk", "mtp_depths")} == {
        kind: getattr(RUNS[name].model, kind) > 0 for kind in ("n_routed_experts", "index_topk", "mtp_depths")
    }


@pytest.mark.slow
@EACH
def test_it_learns_in_a_hundred_steps(name, tmp_path):
    assert train("--config", name, "--out", tmp_path / "x", "--steps", "100") == 0
    records = read_metrics(tmp_path / "x")
    assert len(records) == 100 and records[-1]["skipped"] == 0
    for value in FALL[name]:
        first, last = averages(records, value, 10)
        print(f"{name} {value} {first:.4g} -> {last:.4g}")
        assert last < 0.8 * first, value
    if RUNS[name].model.n_routed_experts and name != "dsa-warmup-tiny":
        print(f"{name} load_max {records[-1]['load_max']:.3g}, dead experts {records[-1]['dead_experts']}")
        assert records[-1]["dead_experts"] == 0
