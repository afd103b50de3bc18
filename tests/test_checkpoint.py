"""Training state on disk: what is whole is found, what is not is skipped by name, and nothing good is ever lost."""

import errno
import json
import os
import random
import re
import signal
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import random_params, tiny
from training import RUN, contents, numbers, save, text, train

from configs import LAYOUTS
from glm5fn import checkpoint, flatten, settings, stores
from glm5fn.checkpoint import State, defects, newest, restore
from glm5fn.mesh import RunError
from glm5fn.settings import OptimConfig, RunConfig
from glm5fn.tree import tree_map

CFG, ADAMW, SGD = tiny(), OptimConfig(), OptimConfig(name="sgd")


def run_of(optim=ADAMW, cfg=CFG):
    return RunConfig(name="tiny", model=cfg, layout=LAYOUTS["fsdp"], optim=optim)


TEXT = settings.dump(run_of())


def state(step=4, optim=ADAMW):
    """A state in which every number is another, counters included."""
    params = random_params(CFG, seed=step)
    moments = {"mean": random_params(CFG, seed=100 + step), "square": random_params(CFG, seed=200 + step)}
    moments["updates"] = tree_map(lambda leaf: torch.tensor(float(step)), params)
    moments = moments if optim is ADAMW else {}
    return State(params=params, moments=moments, step=step, samples=10 * step + 1, tokens=90 * step, skipped=step - 1)


def load(path, optim=ADAMW, cfg=CFG):
    return restore(path, run_of(optim, cfg), None, "cpu")


def bits(state):
    """All that a state is, in a form that can be compared."""
    leaves = flatten({"params": state.params, "moments": state.moments}).items()
    tensors = {path: (leaf.dtype, leaf.shape, leaf.numpy().tobytes()) for path, leaf in leaves}
    return state.step, state.samples, state.tokens, state.skipped, tensors


def fill(root, *steps, keep=9):
    return [save(root, state(step), TEXT, keep=keep) for step in steps]


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_state_comes_back_equal_to_the_bit(tmp_path, optim):
    path = save(tmp_path, state(optim=optim), TEXT, keep=2)
    assert bits(load(path, optim)) == bits(state(optim=optim))
    assert bool(state(optim=optim).moments) == (optim is ADAMW)


def test_a_checkpoint_is_flat_safetensors_that_their_own_library_reads(tmp_path):
    (path,) = fill(tmp_path, 4)
    for name, tree in (("params", state().params), ("moments", state().moments)):
        found, expected = load_file(path / f"{name}.safetensors"), flatten(tree)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_ones_are_kept(tmp_path, keep, left):
    fill(tmp_path, 1, 2, 3, 4, keep=keep)
    assert names(tmp_path) == [f"step_{step:08}" for step in left]


def empty(path):
    for file in path.iterdir():
        file.unlink()


def truncate(path):
    os.truncate(path / "params.safetensors", 2000)


def edit(**changes):
    def damage(path):
        file = path / "state.json"
        found = json.loads(file.read_text()) | changes
        counters = {name: found[name] for name in checkpoint.COUNTERS}
        found["checksum"] = checkpoint.checksum_of(counters, found["files"])
        file.write_text(json.dumps(found))

    return damage


def edit_alone(path):
    file = path / "state.json"
    file.write_text(file.read_text().replace('"samples": 81', '"samples": 18'))


def become_text(path):
    empty(path)
    path.rmdir()
    path.write_text("not a directory")


DAMAGES = {
    "empty": (empty, "state.json cannot be read (FileNotFoundError"),
    "a text file": (become_text, "state.json cannot be read (NotADirectoryError"),
    "truncated": (truncate, "params.safetensors has 2000 bytes, not "),
    "without its moments": (lambda path: (path / "moments.safetensors").unlink(), "moments.safetensors is missing"),
    "without its last file": (lambda path: (path / "state.json").unlink(), "state.json cannot be read"),
    "with half a state": (lambda path: os.truncate(path / "state.json", 30), "state.json cannot be read (JSONDecode"),
    "of another step": (edit(step=3), " is named for another step than the one that its state.json holds, 3"),
    "with another counter": (edit_alone, "state.json cannot be read (ValueError('its checksum differs')"),
    "without a counter": (edit(samples=None), "state.json cannot be read (TypeError"),
    "without a list of files": (edit(files=[1]), "state.json cannot be read (TypeError"),
}


@pytest.fixture(params=DAMAGES)
def damaged(tmp_path, request):
    """A run whose newest checkpoint is damaged, that checkpoint, and what must be said of it."""
    damage, said = DAMAGES[request.param]
    path = fill(tmp_path, 2, 8)[1]
    damage(path)
    return tmp_path, path, said


def test_the_newest_whole_one_is_found_and_what_was_skipped_is_named(damaged):
    root, path, said = damaged
    found, skipped = newest(root)
    assert found == root / "step_00000002" and len(skipped) == 1
    assert skipped[0].startswith(str(path)) and said in skipped[0]


def test_a_damaged_one_is_refused_with_its_file(damaged):
    _, path, said = damaged
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_damaged_one_counts_for_nothing_and_is_left_alone(damaged):
    root, path, _ = damaged
    fill(root, 3, keep=1)
    assert names(root) == ["step_00000003", "step_00000008"] and defects(path)


def test_names_that_are_not_those_of_checkpoints_are_left_alone(tmp_path):
    strange = ["notes", "step_9", "step_00000009.old", "step_", "last"]
    for name in strange:
        (tmp_path / name).mkdir()
    fill(tmp_path, 4, 5, keep=1)
    assert names(tmp_path) == sorted([*strange, "step_00000005"])
    assert newest(tmp_path) == (tmp_path / "step_00000005", [])


def test_steps_beyond_eight_digits_are_found(tmp_path):
    fill(tmp_path, 99_999_999, 100_000_000)
    assert newest(tmp_path) == (tmp_path / "step_100000000", [])


def test_there_is_nothing_to_find_where_nothing_was_saved(tmp_path):
    assert newest(tmp_path) == newest(tmp_path / "none") == (None, [])


def test_the_same_step_can_be_saved_again(tmp_path):
    fill(tmp_path, 4, 8)
    again = replace(state(5), step=8)
    assert bits(load(save(tmp_path, again, TEXT, keep=2))) == bits(again)
    assert names(tmp_path) == ["step_00000004", "step_00000008"]


def test_what_a_resume_abandoned_is_dropped_once_the_new_one_is_whole(tmp_path):
    fill(tmp_path, 4, 8, 12)
    fill(tmp_path, 6)
    assert names(tmp_path) == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize("step", [8, 9])
@pytest.mark.parametrize("file", ["params.safetensors", "moments.safetensors", "state.json"])
def test_a_write_that_fails_is_told_and_loses_nothing(tmp_path, monkeypatch, step, file):
    fill(tmp_path, 8)
    before, tensors, write_text = contents(tmp_path), stores.write_tensors, Path.write_text

    def fail(function):
        def write(path, *rest, **more):
            if Path(path).name == file:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(path, *rest, **more)

        return write

    monkeypatch.setattr(stores, "write_tensors", fail(tensors))
    monkeypatch.setattr(Path, "write_text", fail(write_text))
    with pytest.raises(RunError, match=rf"step_0000000{step} failed: .*No space left on device"):
        fill(tmp_path, step, keep=1)
    assert contents(tmp_path) == before and names(tmp_path) == ["step_00000008"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    fill(tmp_path, 1)
    saved = bits(state(1))[3]
    last = 1
    for trial in range(20):
        child = os.fork()
        if child == 0:
            try:
                for step in count(last):
                    save(tmp_path, replace(state(1), step=step), TEXT, keep=1)
            finally:
                os._exit(1)
        time.sleep(random.Random(trial).uniform(0.01, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        path, skipped = newest(tmp_path)
        assert path is not None and skipped == [] and checkpoint.number(path) >= last
        assert bits(load(path))[3] == saved
        last = checkpoint.number(path)
    (path,) = fill(tmp_path, last + 1, keep=1)
    assert names(tmp_path) == [path.name]


def test_an_older_save_of_a_step_that_a_kill_left_aside_is_still_found(tmp_path):
    (path,) = fill(tmp_path, 8)
    path.rename(tmp_path / ".step_00000008.replaced")
    found, skipped = newest(tmp_path)
    assert found is not None and skipped == [] and bits(load(found)) == bits(state(8))
    fill(tmp_path, 8)
    assert names(tmp_path) == ["step_00000008"]


def test_another_model_or_optimizer_is_refused_with_all_its_tensors(tmp_path):
    (path,) = fill(tmp_path, 4)
    with pytest.raises(ValueError, match=r"embed in params\.safetensors has shape"):
        load(path, cfg=tiny(vocab_size=31))
    with pytest.raises(ValueError, match=r"unexpected: mean\.embed in moments\.safetensors, "):
        load(path, SGD)
    with pytest.raises(ValueError, match=r"missing: mean\.embed, "):
        load(save(tmp_path, state(5, SGD), TEXT, keep=2))


@pytest.fixture
def run(tmp_path, capsys):
    """A function that starts train.py in `x`, saving every 4 steps, and gives its exit code and what it said."""
    argv = [*RUN, "--data.path", text(tmp_path), "--out", tmp_path / "x", "--checkpoint.every", "4"]

    def run(*more):
        return train(*argv, *more), "".join(capsys.readouterr())

    return run


def test_a_run_goes_on_from_the_newest_whole_one_and_says_what_it_skipped(run, tmp_path):
    assert run("--steps", "8")[0] == 0
    root = tmp_path / "x" / "checkpoints"
    (root / "step_00000999").mkdir()
    truncate(root / "step_00000008")
    code, said = run("--steps", "9", "--resume", "auto")
    assert code == 0 and f"resuming {root / 'step_00000004'}" in said and numbers(tmp_path / "x")[-1][0] == 9
    for name in ("step_00000999/state.json", "step_00000008/params.safetensors"):
        assert f"skipping a checkpoint that is not whole: {root / name}" in said


def test_a_run_goes_on_from_an_earlier_one_and_drops_the_later_ones_at_its_first_save(run, tmp_path):
    run("--steps", "8")
    root, straight = tmp_path / "x" / "checkpoints", numbers(tmp_path / "x")
    assert run("--steps", "6", "--resume", root / "step_00000004")[0] == 0
    assert names(root) == ["step_00000004", "step_00000006"] and numbers(tmp_path / "x") == straight[:6]


def test_a_save_that_fails_ends_the_run_with_the_path_and_the_cause(run, tmp_path, monkeypatch):
    run("--steps", "4")
    root = tmp_path / "x" / "checkpoints"
    before = contents(root)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "write_tensors", fail)
    code, said = run("--steps", "8", "--resume", "auto", "--checkpoint.keep", "1")
    assert code == 1 and f"saving checkpoint {root / 'step_00000008'} failed" in said and "No space left" in said
    assert contents(root) == before
    monkeypatch.undo()
    assert run("--steps", "8", "--resume", "auto")[0] == 0
