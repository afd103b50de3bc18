"""Checkpoints in both stores: copied before they are written, checked before they are read, and never half there."""

import json
import resource
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
import torch
from test_checkpoint import CFG, TEXT, bits, load, names, state
from test_layouts import make
from training import RUN, numbers, peers, save, text, train

import glm5fn
from convert import main as convert
from glm5fn import arrays, checkpoint, flatten, manager, stores
from glm5fn.checkpoint import damage, newest
from glm5fn.manager import CheckpointManager
from glm5fn.mesh import RunError
from glm5fn.settings import CheckpointConfig, MeshConfig, dump
from glm5fn.stores import open_item

STORES = ["safetensors", "tensorstore", "elsewhere"]
EACH_STORE = pytest.mark.parametrize("store", STORES)


@pytest.fixture
def how(store, tmp_path):
    """The settings of a store."""
    elsewhere = {"store": "tensorstore", "url": f"file://{tmp_path}/elsewhere"}
    return elsewhere if store == "elsewhere" else {"store": store}


@contextmanager
def managed(root, **how):
    with CheckpointManager(root, CheckpointConfig(**how), TEXT, peers()) as found:
        yield found


def root_of(tmp_path):
    return tmp_path / "checkpoints"


@EACH_STORE
def test_a_state_comes_back_equal_to_the_bit(tmp_path, how):
    one = state()
    flatten(one.params)["embed"].view(-1)[:2] = torch.tensor([-0.0, 1e-42])
    flatten(one.moments)["mean.embed"].zero_()
    flatten(one.moments)["square.embed"].fill_(-0.0)
    path = save(root_of(tmp_path), one, TEXT, **how)
    assert bits(load(path)) == bits(one) and damage(path, peers()) == []


@EACH_STORE
def test_regions_and_runs_of_values_are_those_of_the_whole(tmp_path, how):
    path = save(root_of(tmp_path), state(), TEXT, **how)
    found, expected = open_item(path, "params"), flatten(state().params)
    assert found.rows.keys() == expected.keys()
    for key, leaf in expected.items():
        region = tuple((n // 3, n - n // 3 - n // 4) for n in leaf.shape)
        assert torch.equal(found.read(key, region), leaf[tuple(slice(a, a + n) for a, n in region)])
        start, count = leaf.numel() // 3, leaf.numel() // 2
        assert torch.equal(found.read_flat(key, start, count), leaf.flatten()[start : start + count])


@EACH_STORE
def test_what_a_step_changes_while_it_is_written_is_not_in_it(tmp_path, how, monkeypatch):
    """Six saves in the background: each is written once a step has changed all that it saved, in place."""
    root, moving, stepped, straight = root_of(tmp_path), state(), Event(), []
    for step in range(1, 7):
        save(tmp_path / "straight", replace(moving, step=step), TEXT, keep=9, **how)
        straight.append(bits(moving)[4])
        change(moving)
    moving = state()
    for name in ("write_files", "write_arrays"):
        monkeypatch.setattr(manager, name, behind(stepped, getattr(manager, name)))
    with managed(root, keep=9, **how) as found:
        for step in range(1, 7):
            found.save(replace(moving, step=step))
            change(moving)
            stepped.set()
            found.wait()
            stepped.clear()
    assert all(one != other for one, other in pairwise(straight))
    for step in range(1, 7):
        one, other = (place / f"step_{step:08}" for place in (root, tmp_path / "straight"))
        assert bits(load(one)) == bits(load(other))
        if "store" not in how or how["store"] == "safetensors":
            for file in ("params.safetensors", "moments.safetensors"):
                assert (one / file).read_bytes() == (other / file).read_bytes()


def change(moving):
    for leaf in flatten({"params": moving.params, "moments": moving.moments}).values():
        leaf.add_(1.0)


def behind(event, function):
    """The function, which waits for the event first."""
    return lambda *args: (event.wait(30), function(*args))[1]


def slow_down(monkeypatch, seconds):
    def slow(function):
        return lambda *args: (time.sleep(seconds), function(*args))[1]

    for name in ("write_files", "write_arrays"):
        monkeypatch.setattr(manager, name, slow(getattr(manager, name)))


def test_a_save_waits_for_the_one_before_it_and_uses_its_copies_again(tmp_path, monkeypatch):
    slow_down(monkeypatch, 0.3)
    with managed(root_of(tmp_path)) as found:
        found.save(state(1))
        places = {key: copy.data_ptr() for key, copy in found.copies.items()}
        begin = time.perf_counter()
        found.save(state(2))
        assert time.perf_counter() - begin > 0.2
        assert {key: copy.data_ptr() for key, copy in found.copies.items()} == places and len(places) > 30
        assert names(root_of(tmp_path))[-1] == "step_00000001"
    assert names(root_of(tmp_path)) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("last", [True, False])
def test_what_goes_wrong_in_the_background_is_raised_by_the_next_save_or_at_the_end(tmp_path, monkeypatch, last):
    root = root_of(tmp_path)
    save(root, state(1), TEXT)

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(stores, "write_tensors", fail)
    with pytest.raises(RunError, match=r"step_00000002 failed: No space left on device"), managed(root) as found:
        found.save(state(2))
        if not last:
            found.save(state(3))
            pytest.fail("it was not raised")
    assert names(root) == ["step_00000001"]


def flip(path):
    """One bit in the middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(directory):
    """The largest file of a checkpoint, be it elsewhere."""
    place = directory / "arrays.json"
    root = Path(json.loads(place.read_text())["url"].removeprefix("file://")) if place.exists() else directory
    return max((path for path in root.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@EACH_STORE
@pytest.mark.parametrize("harm", [flip, halve, Path.unlink], ids=["one bit", "truncated", "missing"])
def test_what_is_damaged_is_named_and_the_one_before_is_taken(tmp_path, how, harm):
    root = root_of(tmp_path)
    for step in (1, 2):
        save(root, state(step), TEXT, **how)
    harm(file := largest(root / "step_00000002"))
    found, skipped = newest(root, peers())
    assert found == root / "step_00000001" and len(skipped) == 1
    assert str(root / "step_00000002") in skipped[0] and file.name in skipped[0]


def test_a_run_goes_on_from_before_a_bit_that_was_flipped_and_refuses_it_by_name(tmp_path, capsys):
    argv = [*RUN, "--data.path", text(tmp_path), "--out", tmp_path / "x", "--checkpoint.every", "2"]
    assert train(*argv, "--steps", "4") == 0
    path = tmp_path / "x" / "checkpoints" / "step_00000004"
    flip(path / "moments.safetensors")
    assert train(*argv, "--steps", "6", "--resume", path) == 1
    assert f"{path / 'moments.safetensors'} does not hold what was written" in capsys.readouterr().err
    assert train(*argv, "--steps", "6", "--resume", "auto") == 0
    said = capsys.readouterr().out
    assert "skipping a checkpoint that is not whole" in said and "resuming" in said and "step_00000002" in said
    straight = [*argv[:-3], tmp_path / "straight", *argv[-2:]]
    assert train(*straight, "--steps", "6", "--checkpoint.no-async", "--checkpoint.store", "tensorstore") == 0
    assert numbers(tmp_path / "x") == numbers(tmp_path / "straight")


@EACH_STORE
def test_a_checkpoint_is_exported_and_taken_as_a_start_like_a_native_directory(tmp_path, how):
    path = save(root_of(tmp_path), state(), TEXT, **how)
    glm5fn.save(tmp_path / "native", state().params, CFG)
    for name, source in {"one": path, "other": tmp_path / "native"}.items():
        assert convert(["native-to-hf", str(source), str(tmp_path / name)]) == 0
    one, other = (tmp_path / name / "model.safetensors" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "other" / "config.json").read_text()
    cfg, params = glm5fn.load(path)
    assert cfg == CFG and all(torch.equal(flatten(params)[key], leaf) for key, leaf in flatten(state().params).items())


def test_the_newest_stay_and_those_of_every_so_many_steps(tmp_path):
    for step in range(1, 12):
        save(root_of(tmp_path), state(step), TEXT, keep=2, keep_every=4)
    assert names(root_of(tmp_path)) == [f"step_{step:08}" for step in (4, 8, 10, 11)]


def there(tmp_path):
    """What is elsewhere: the directories that are not empty."""
    return sorted({path.parent.name for path in (tmp_path / "elsewhere").rglob("manifest.ocdbt")})


@pytest.mark.parametrize("store", ["elsewhere"])
def test_arrays_elsewhere_go_with_their_checkpoint(tmp_path, how, monkeypatch):
    root = root_of(tmp_path)
    for step in (1, 2, 3, 3):
        save(root, state(step), TEXT, keep=2, **how)
    assert [name[:13] for name in there(tmp_path)] == ["step_00000002", "step_00000003"]
    monkeypatch.setattr(manager, "print_of", lambda *_: 1 / 0)
    with pytest.raises(RunError, match="ZeroDivisionError"):
        save(root, state(4), TEXT, **how)
    assert [name[:13] for name in there(tmp_path)] == ["step_00000002", "step_00000003"]
    monkeypatch.undo()
    killed = root / ".step_00000009.partial"
    shutil.copytree(root / "step_00000002", killed)  # which says where its arrays are
    copied = tmp_path / "copied"
    shutil.copytree(root, copied)  # and owns none
    save(root, state(5), TEXT, keep=2, **how)
    assert not killed.exists() and [name[:13] for name in there(tmp_path)] == ["step_00000003", "step_00000005"]
    save(copied, state(6), TEXT, keep=1, **how)
    assert [name[:13] for name in there(tmp_path)] == ["step_00000003", "step_00000005", "step_00000006"]


@contextmanager
def full_disk(room):
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@EACH_STORE
@pytest.mark.parametrize("background", [True, False])
def test_a_disk_without_room_is_told_and_leaves_what_was_there(tmp_path, how, background):
    root = root_of(tmp_path)
    save(root, state(1), TEXT, **how)
    with pytest.raises(RunError, match=r"step_00000002 failed: .*[Ff]ile too large"), full_disk(9000):
        save(root, state(2), TEXT, background=background, **how)
    assert names(root) == ["step_00000001"] and bits(load(root / "step_00000001")) == bits(state(1))


@EACH_STORE
def test_a_directory_that_is_taken_away_is_told(tmp_path, how, monkeypatch):
    root = root_of(tmp_path)
    save(root, state(1), TEXT, **how)
    real = manager.files_of

    def take_away(directory):
        shutil.rmtree(directory)
        return real(directory)

    monkeypatch.setattr(manager, "files_of", take_away)
    with pytest.raises(RunError, match=r"step_00000002 failed: .*No such file"):
        save(root, state(2), TEXT, **how)
    assert names(root) == ["step_00000001"] and bits(load(root / "step_00000001")) == bits(state(1))


def failing_on_one(grid, root, how, failing):
    """A save that is whole, then one that fails on one rank: what each rank says, and what is there."""
    setup, one = make(grid)
    save(root, one, dump(setup.run), **how)
    name = "write_tensors" if how["store"] == "safetensors" else "as_array"
    module = stores if how["store"] == "safetensors" else arrays
    real = getattr(module, name)

    def fail(*args):
        raise OSError(f"the disk of rank {failing} is gone")

    try:
        setattr(module, name, fail if peers().rank == failing else real)
        save(root, replace(one, step=1), dump(setup.run), **how)
    except RunError as error:
        return str(error), names(root), damage(root / "step_00000000", peers())
    finally:
        setattr(module, name, real)


@EACH_STORE
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_ends_all_and_leaves_what_was_there(pools, tmp_path, how, failing):
    root = root_of(tmp_path)
    for found, left, wrong in pools(2)(failing_on_one, MeshConfig(dp_shard=2), root, how, failing):
        assert f"the disk of rank {failing} is gone" in found and f"{root / 'step_00000001'}" in found
        assert left == ["step_00000000"] and wrong == []


def test_ranks_own_about_as_many_bytes_each(tmp_path):
    tensors = {key: manager.held(leaf) for key, leaf in flatten(state().params).items()}
    owned = stores.owners(tensors, 3)
    assert sorted(key for keys in owned for key in keys) == sorted(tensors)
    loads = [sum(tensors[key].bytes for key in keys) for keys in owned]
    assert max(loads) - min(loads) <= max(one.bytes for one in tensors.values())
    assert CFG.vocab_size == 29


@pytest.mark.parametrize("name", ["a%41b", "a b#c?d", "é世"])
@pytest.mark.parametrize("store", ["tensorstore"])
def test_a_directory_of_any_name_holds_its_arrays(tmp_path, name, how):
    (tmp_path / name).mkdir()
    path = save(tmp_path / name / "c", state(), TEXT, **how)
    assert bits(load(path)) == bits(state()) and (path / "arrays" / "manifest.ocdbt").is_file()


def test_a_place_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"memory://x/step_00000004-\w+/: what was written there is not there"):
        save(root_of(tmp_path), state(), TEXT, store="tensorstore", url="memory://x")
    assert names(root_of(tmp_path)) == []


@EACH_STORE
@pytest.mark.parametrize("left", ["no tensors", "no state", "a file", "arrays nowhere"])
def test_a_step_that_is_damaged_can_be_saved_again(tmp_path, how, left):
    root = root_of(tmp_path)
    path = save(root, state(4), TEXT, **how)
    if left == "a file":
        shutil.rmtree(path)
        path.write_text("")
    elif left == "no state":
        (path / "state.json").unlink()
    elif left == "arrays nowhere":
        (path / "arrays.json").write_text("")
    else:
        for file in path.glob("*.safetensors"):
            file.unlink()
        shutil.rmtree(path / "arrays", ignore_errors=True)
    assert bits(load(save(root, state(4), TEXT, **how))) == bits(state(4))


def test_what_cannot_be_removed_is_told_and_hinders_no_save(tmp_path):
    root = root_of(tmp_path)
    save(root, state(1), TEXT)
    shutil.move(root / "step_00000001", tmp_path / "archived")
    (root / "step_00000001").symlink_to(tmp_path / "archived")
    (root / ".step_00000009.partial").mkdir()
    (root / ".step_00000009.partial" / "arrays.json").write_text("")
    (root / ".step_00000008.partial").write_text("")
    with managed(root, keep=1) as found:
        found.save(state(2))
        found.wait()
        assert len(found.notices) == 1 and "arrays.json cannot be read" in found.notices[0]
    assert names(root) == ["step_00000002"] and bits(load(tmp_path / "archived")) == bits(state(1))


def test_a_file_that_was_put_beside_those_of_a_checkpoint_is_none_of_them(tmp_path):
    path = save(root_of(tmp_path), state(), TEXT)
    shutil.copy(path / "params.safetensors", path / "params.bak.safetensors")
    assert bits(load(path)) == bits(state())


def test_a_run_directory_that_is_gone_is_told_and_not_made_anew(tmp_path):
    with pytest.raises(RunError, match=r"step_00000004 failed: .*No such file"):
        save(tmp_path / "gone" / "checkpoints", state(), TEXT)
    assert not (tmp_path / "gone").exists()


def listing_another(root, seen):
    """What each rank goes on from, if the last does not see the newest."""
    real = checkpoint.steps
    checkpoint.steps = lambda root: real(root)[seen if peers().rank == peers().world - 1 else 0 :]
    try:
        return newest(root, peers())
    finally:
        checkpoint.steps = real


def test_ranks_that_list_other_checkpoints_go_on_from_one(pools, tmp_path):
    for step in (4, 8):
        save(root_of(tmp_path), state(step), TEXT)
    assert pools(2)(listing_another, root_of(tmp_path), 1) == [(root_of(tmp_path) / "step_00000008", [])] * 2


def without_room(grid, root):
    """A save in which one rank has no memory for a whole tensor: what each says."""
    setup, one = make(grid)
    with pytest.MonkeyPatch.context() as patch:
        if peers().rank == 1:
            patch.setattr(stores, "room_for", lambda held: None)
        with pytest.raises(RunError) as error:
            save(root, one, dump(setup.run))
    return str(error.value)


def test_a_rank_without_memory_for_a_tensor_keeps_no_other_waiting(pools, tmp_path):
    for said in pools(2)(without_room, MeshConfig(dp_shard=2), root_of(tmp_path), timeout=60):
        assert "step_00000000 failed" in said and "did not come: there is no more, or no memory for its" in said
    assert names(root_of(tmp_path)) == []


@pytest.mark.parametrize("where", [("params.safetensors", 20), ("config.yaml", 5)])
def test_a_bit_that_was_flipped_anywhere_is_no_reason_to_blame_the_model(tmp_path, capsys, where):
    argv = [*RUN, "--data.path", text(tmp_path), "--out", tmp_path / "x", "--checkpoint.every", "2"]
    assert train(*argv, "--steps", "4") == 0
    file = tmp_path / "x" / "checkpoints" / "step_00000004" / where[0]
    raw = bytearray(file.read_bytes())
    raw[where[1]] ^= 4
    file.write_bytes(raw)
    assert train(*argv, "--steps", "5", "--resume", "auto") == 0
    assert f"{file} does not hold what was written" in capsys.readouterr().out


def test_a_run_without_any_whole_checkpoint_does_not_begin_anew(tmp_path, capsys):
    argv = [*RUN, "--data.path", text(tmp_path), "--out", tmp_path / "x"]
    assert train(*argv, "--steps", "2") == 0
    path = tmp_path / "x" / "checkpoints" / "step_00000002"
    flip(path / "moments.safetensors")
    before = numbers(tmp_path / "x")
    assert train(*argv, "--steps", "4", "--resume", "auto") == 1
    assert " is whole (" in capsys.readouterr().err
    assert path.is_dir() and numbers(tmp_path / "x") == before
    for argv in (["native-to-hf", str(path), str(tmp_path / "out")],):
        flip(path / "params.safetensors")
        assert convert(argv) == 1 and "does not hold what was written" in capsys.readouterr().err
    assert train(*RUN, "--init", path, "--out", tmp_path / "y", "--steps", "1") == 2
