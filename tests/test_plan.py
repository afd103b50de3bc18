"""`train.py --plan` as a user calls it: in seconds, without a file or a process, for every size there is."""

import time

import pytest
from training import train

from configs import RUNS
from glm5fn.flops import parameters


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


@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_be_planned_in_seconds(told, name):
    start = time.perf_counter()
    said = told("--config", name)
    assert time.perf_counter() - start < 10
    counted = parameters(RUNS[name].model)
    assert f"{counted.total:,} " in said and f"{counted.active:,} " in said
    for line in ("FLOPs of a step", "moments on a rank", "together on a rank", "largest tensor"):
        assert line in said


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("glm5-744b", ("743,911,199,232", "41,784,709,632", "40,833,126,912")),
        ("glm5.2-744b", ("743,377,000,704", "41,250,511,104", "40,298,928,384")),
    ],
)
def test_the_plan_of_glm5_has_its_published_counts(told, name, numbers):
    said = told("--config", name)
    assert all(number in said for number in numbers)


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
