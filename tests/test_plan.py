"""`train.py --plan` as a user calls it, without a file or a process, and its figures against those of real runs."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layouts import ALL, GRIDS, MODELS, make
from training import train

from configs import RUNS
from glm5fn import step
from glm5fn.flops import parameters
from glm5fn.plan import human, kept
from glm5fn.rehearsal import Ledger, by_kind, rehearse
from glm5fn.settings import IndexerConfig, MeshConfig, RouterConfig
from glm5fn.textbook import textbook


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """`told(*argv)`: what train.py said, which ended well, started nothing and wrote no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("train.train", lambda *_, **__: pytest.fail("the run was started"))

    def told(*argv):
        assert train(*argv, "--plan") == 0
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out

    return told


QUICK = ("dense-dp2", "moe-ep2")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name", NAMES)
def test_every_run_can_be_planned(told, name):
    said = told("--config", name)
    counted = parameters(RUNS[name].model)
    assert f"{counted.total:,} " in said and f"{counted.active:,} " in said
    for line in ("FLOPs of a step", "moments on a rank", "together on a rank", "largest tensor", "exchanged in a step"):
        assert line in said


def test_the_plan_tells_the_bytes_that_decoding_keeps_of_a_token():
    full, more = "index 256 B in {} layers", "latent 1,152 B in 78 layers"  # 512 + 64 and 128 numbers in bf16
    assert kept(RUNS["glm5-744b"].model, torch.bfloat16).endswith(f"generates: {more}, {full.format(78)}")
    assert kept(RUNS["glm5.2-744b"].model, torch.bfloat16).endswith(f"generates: {more}, {full.format(21)}")
    assert "latent 2,304 B in 78 layers" in kept(RUNS["glm5-744b"].model, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks, numbers",
    [
        ("glm5-744b", 256, ("743,911,199,232", "41,784,709,632", "40,833,126,912")),
        ("glm5.2-744b", 4096, ("743,377,000,704", "41,250,511,104", "40,298,928,384")),
    ],
)
def test_the_plan_of_glm5_has_its_published_counts_and_fits_in_a_minute_and_80_gb(told, name, ranks, numbers):
    start = time.perf_counter()
    said = told("--config", name, "--mesh.dp-shard", str(ranks), "--data.global-batch", str(ranks))
    assert time.perf_counter() - start < 60
    assert all(number in said for number in numbers)
    assert ", within 80 GB" in said


def exchanged_by_a_step(grid, settings):
    setup, state = make(grid, dtype=torch.float32, **settings)
    with Ledger() as ledger:
        step.step(setup, state, stop=False)
    return by_kind(ledger.exchanges)


EXCHANGING = [("ep 2", "none"), ("cp 2 x ep 2", "layer"), ("replicate 2 x shard 2", "none")]
EXCHANGING += [("shard 2 x cp 2 x ep 4", "none")]
EXCHANGING = [pytest.param(*cell, marks=pytest.mark.slow) for cell in EXCHANGING]
EXCHANGING += [
    ("replicate 2 x shard 2 x ep 2", "layer"),
    ("shard 2 x tp 2 x ep 2, in experts", "layer"),
    ("tp 2", "none"),
]


@pytest.mark.parametrize(("grid", "recompute"), EXCHANGING)
def test_the_planned_bytes_of_each_exchange_are_those_of_a_step(grid, recompute, pools):
    settings = ALL | {"recompute": recompute, "micro": 2 if GRIDS[grid].cp > 1 else 1}
    setup, _ = make(MeshConfig(), dtype=torch.float32, **settings)
    planned = rehearse(replace(setup.run, mesh=GRIDS[grid], device="cpu")).exchanged
    counted = pools(GRIDS[grid].world)(exchanged_by_a_step, GRIDS[grid], settings)
    total = sum(map(Counter, counted), Counter())  # ranks get and send on what their experts are chosen for
    assert total.pop("all-to-all", 0) == planned.pop("all-to-all", 0) * GRIDS[grid].world
    for found in counted:
        assert {kind: n for kind, n in found.items() if kind != "all-to-all"} == planned


def test_the_plan_tells_what_is_exchanged_over_tp(told):
    """Two branches in each of six layers, forward and backward, the embedding and the head, in two micro-batches."""
    moved = (2 * 6 * 2 + 2) * 2 * (4 * 256 * 192 * 4)
    lines = told("--config", "dense-tp2").splitlines()
    over_tp = next(line for line in lines if line.startswith("  over tp"))
    for kind in ("all-gather", "reduce-scatter"):
        assert f"{kind} {human(moved, 'B', 1024)}" in over_tp
        assert f"{kind} {human(moved, 'B', 1024)}" in next(line for line in lines if line.startswith("exchanged"))


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ("tp 2", {"model": MODELS["dense, split"]["model"]}),
        ("tp 4", {"model": MODELS["tied, split"]["model"], "precision": "bf16"}),
        ("tp 4", {"model": MODELS["dense, split"]["model"], "recompute": "layer"}),
        ("tp 2", {"model": replace(RUNS["dense-tiny"].model, num_hidden_layers=2), "recompute": "layer"}),
        ("tp 4, in experts", ALL),
        ("tp 4, in experts", ALL | {"recompute": "layer"}),
    ],
)
def test_what_ranks_of_tp_exchange_is_what_the_textbook_says(grid, settings):
    settings = settings | {"router": RouterConfig(balance_coef=0.0), "indexer": IndexerConfig(), "micro": 2}
    setup, _ = make(MeshConfig(), dtype=torch.float32, **settings)
    run = replace(setup.run, mesh=GRIDS[grid], device="cpu")
    counted, expected = rehearse(run).exchanged, textbook(run)
    assert counted.pop("all-gather") == expected["all-gather"]
    assert counted.pop("reduce-scatter") == expected["reduce-scatter"]
    assert 0 <= counted.pop("all-reduce") - expected["all-reduce"] < 1000  # the counts and sums of all ranks
    assert not counted


MEASURE = """
import resource, sys
import train
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert train.main(sys.argv[1:]) == 0
print("above import", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
GIB = [  # more than 1 GiB of parameters, moments and gradients
    *("--config", "dense-0.5b", "--model.num-hidden-layers", "4", "--model.vocab-size", "60000"),
    *("--data.held-out", "0", "--data.global-batch", "2", "--precision", "fp32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_the_planned_memory_is_what_a_run_of_one_process_takes(told, tmp_path, recompute):
    said = told(*GIB, "--recompute", recompute)
    number, unit = re.search(r"together on a rank +([\d.]+) (\w)iB", said).groups()
    planned = float(number) * 2 ** {"M": 20, "G": 30}[unit]
    settings = [*GIB, "--recompute", recompute, "--steps", "2", "--out", str(tmp_path / "x")]
    command = [sys.executable, "-c", MEASURE, *settings]
    root = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=root, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    measured = int(re.findall(r"above import (\d+)", ran.stdout)[0])
    print(f"planned {planned / 2**30:.2f} GiB, measured {measured / 2**30:.2f}, {planned / measured:.3f}")
    assert abs(planned / measured - 1) < 0.15


def test_the_plan_follows_the_settings(told):
    lines = [told("--config", "dsa-tiny", "--indexer.stage", stage) for stage in ("frozen", "dense-warmup", "sparse")]
    held = [next(line for line in text.splitlines() if line.startswith("moments on a rank")) for text in lines]
    assert len(set(held)) == 3


def test_a_place_that_is_taken_does_not_hinder_a_plan(told, tmp_path):
    for flags in (["--out", "/proc/x"], ["--resume", "none"], ["--export", "/proc"]):
        assert "parameters" in told("--config", "moe-tiny", *flags)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--config glm5-744b --indexer.coef -1", "indexer.coef (-1.0) must be finite and at least 0"),
        (
            "--config glm5-744b --mesh.dp-shard 255",
            "data.global-batch (256) must be a multiple of data.micro-batch (1)",
        ),
        ("--config glm5-745b", "--config glm5-745b is not known: did you mean glm5"),
        ("--config dense-tiny --mtp.coef 1", "--mtp.coef would change nothing"),
        ("--planned", "--plan"),
    ],
)
def test_a_plan_of_what_cannot_be_run_is_refused(refuse, argv, said):
    assert said in refuse(*argv.split(), *(["--plan"] if "--planned" not in argv else []))
