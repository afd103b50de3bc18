"""Steps that cannot be taken, for want of a finite gradient or of a label: they are counted, and change nothing."""

import pytest
from safetensors.torch import load_file
from training import BATCH, TINY, fixed, numbers, state, text, train

from configs import RUNS
from glm5fn import init_params, save, step
from glm5fn.checkpoint import steps
from glm5fn.command import parse
from glm5fn.record import read_metrics

FLAT = ["--optim.schedule", "constant", "--optim.warmup-steps", "0", "--optim.lr", "0.01"]
FLAGS = [*TINY, *BATCH, *FLAT, "--data.global-batch", "2", "--data.micro-batch", "1"]


@pytest.fixture
def go(tmp_path, capsys):
    """`go(name, data, *flags)` trains in the directory `name`; returns the exit code and what was said."""

    def go(name, data, *flags):
        code = train(*FLAGS, "--data.path", data, "--out", tmp_path / name, *flags)
        return code, "".join(capsys.readouterr())

    return go


def spoil(monkeypatch, name, tree, call):
    """Make one element infinite in a tree that a function of the run gives or takes, at this call of it."""
    function, calls = getattr(step, name), []

    def spoilt(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(name)
        if len(calls) == call:
            tree(args, result)["norm"].view(-1)[3] = float("inf")
        return result

    monkeypatch.setattr(step, name, spoilt)


@pytest.mark.parametrize("steps", [3, 99])
def test_weights_that_give_no_finite_gradient_end_the_run_and_are_not_saved(go, tmp_path, steps):
    cfg = parse(TINY, RUNS).run.model
    params = init_params(cfg)
    params["norm"][3] = float("inf")
    save(tmp_path / "weights", params, cfg)
    code, said = go("x", text(tmp_path), "--init", tmp_path / "weights", "--steps", str(steps))
    assert code == 1
    if steps == 3:
        assert "step 3: parameters or moments are not finite, so they were not saved" in said
    else:
        assert "step 10: 10 steps in a row had no finite gradient" in said
    found = [(row["step"], row["loss"], row["skipped"]) for row in read_metrics(tmp_path / "x")]
    assert found == [(step, None, step) for step in range(1, min(steps, 10) + 1)]
    assert not (tmp_path / "x" / "checkpoints").exists()


def test_a_rate_that_is_far_too_high_leaves_no_checkpoint_that_is_not_finite(go, tmp_path):
    flags = ["--optim.name", "sgd", "--optim.lr", "1e6", "--checkpoint.every", "1", "--checkpoint.keep", "99"]
    assert go("x", text(tmp_path), *flags, "--steps", "99")[0] == 1
    saved = steps(tmp_path / "x" / "checkpoints")
    assert saved
    for path in saved:
        assert all(leaf.isfinite().all() for leaf in load_file(path / "params.safetensors").values())


def test_moments_that_are_not_finite_are_not_saved(go, tmp_path, monkeypatch):
    spoil(monkeypatch, "update", lambda args, result: args[2]["square"], call=3)
    code, said = go("x", text(tmp_path), "--checkpoint.every", "1", "--steps", "9")
    assert code == 1 and "step 3: parameters or moments are not finite, so they were not saved" in said
    assert [path.name for path in steps(tmp_path / "x" / "checkpoints")] == ["step_00000002", "step_00000001"]


@pytest.mark.parametrize("why", ["gradient", "labels"])
def test_a_step_that_cannot_be_taken_changes_nothing_but_the_count(go, tmp_path, monkeypatch, why):
    go("without", fixed(tmp_path / "without.safetensors", 1, 2, 5, 6), "--steps", "2")
    if why == "gradient":
        spoil(monkeypatch, "gradient", lambda args, result: result[1], call=2)
    bad = (3, 4) if why == "gradient" else (None, None)
    data = fixed(tmp_path / "with.safetensors", 1, 2, *bad, 5, 6)
    assert go("with", data, "--steps", "2")[0] == 0
    assert go("with", data, "--steps", "3", "--resume", "auto")[0] == 0
    rows, expected = numbers(tmp_path / "with"), numbers(tmp_path / "without")
    assert [row[1:4] for row in (rows[0], rows[2])] == [row[1:4] for row in expected]
    assert [row[-1] for row in rows] == [0, 1, 1]
    assert rows[1][1:3] == ((pytest.approx(5.6, abs=0.3), None) if why == "gradient" else (None, 0.0))
    assert state(tmp_path / "with")[1:] == state(tmp_path / "without")[1:]


def test_a_sample_without_a_label_counts_for_nothing_and_is_reported(go, tmp_path):
    go("two", fixed(tmp_path / "two.safetensors", 1, 2), "--steps", "3")
    data = fixed(tmp_path / "three.safetensors", 1, None, 2)
    code, said = go("three", data, "--data.global-batch", "3", "--steps", "3")
    assert code == 0 and f"{data}: 1 of 3 samples have no label" in said
    for one, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "three"), strict=True):
        assert one[1:4] == pytest.approx(other[1:4], rel=1e-6)


def test_data_without_any_label_is_refused_before_the_first_step(go, tmp_path):
    code, said = go("x", fixed(tmp_path / "bare.safetensors", None, None), "--steps", "3")
    assert code == 1 and "bare.safetensors: no sample has a label" in said
    assert not (tmp_path / "x").exists()
