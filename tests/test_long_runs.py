"""Hundred steps of dense-tiny on one, two and four processes, as a user runs them."""

import pytest
import torch
from test_processes import finish, start, weights

from glm5fn.record import read_metrics

pytestmark = pytest.mark.slow
SETTINGS = [
    *("--config", "dense-tiny", "--steps", "100", "--optim.lr", "3e-4", "--optim.clip", "0.5"),
    *("--data.seq-len", "128", "--data.global-batch", "4", "--data.micro-batch", "1"),
]
LAYOUTS = {
    "one": [],
    "dp2": ["--mesh.dp-shard", "2"],
    "dp4": ["--mesh.dp-replicate", "2", "--mesh.dp-shard", "2"],
}


def run(out, *settings):
    code, printed = finish(start(*SETTINGS, *settings, "--out", out), 900)
    assert code == 0, printed
    return read_metrics(out)


def gaps(records, others):
    return [abs(one["loss"] - other["loss"]) for one, other in zip(records, others, strict=True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_layouts_have_the_bits_of_one_process(precision, tmp_path):
    settings = ["--deterministic", "--precision", precision]
    records = {name: run(tmp_path / name, *settings, *layout) for name, layout in LAYOUTS.items()}
    assert max(record["grad_norm"] for record in records["one"][50:]) > 0.5  # clipping is active to the end
    for name in ("dp2", "dp4"):
        for one, other in zip(records["one"], records[name], strict=True):
            assert all(one[key] == other[key] for key in ("loss", "grad_norm", "lr", "tokens")), (name, one["step"])
        expected, found = weights(tmp_path / "one", 100), weights(tmp_path / name, 100)
        assert all(torch.equal(leaf, found[key]) for key, leaf in expected.items())


@pytest.mark.parametrize(("precision", "average"), [("fp32", 1e-6), ("bf16", 1e-3)])
def test_by_default_layouts_differ_by_rounding_alone(precision, average, tmp_path):
    records = {name: run(tmp_path / name, "--precision", precision, *LAYOUTS[name]) for name in LAYOUTS}
    for name in ("dp2", "dp4"):
        found = gaps(records["one"], records[name])
        mean, first = sum(found) / 100, max(found[:10])
        norms = [
            abs(one["grad_norm"] / other["grad_norm"] - 1)
            for one, other in zip(records["one"], records[name], strict=True)
        ]
        print(f"{precision} {name}: average {mean:.3g}, first ten {first:.3g}, norms {max(norms):.3g}")
        assert mean <= average and first <= 1e-6
        assert precision == "bf16" or max(norms) <= 1e-4
