"""Checkpoints of every layout on every other: the same bytes, and the same steps after them."""

from functools import cache
from itertools import product
from math import prod

import pytest
import torch
from test_layouts import GRIDS, MODELS, gathered, grid_of, make
from tiny import distance
from training import save

from glm5fn import checkpoint, flatten, step
from glm5fn.mesh import held
from glm5fn.settings import MeshConfig, dump
from glm5fn.stores import open_item
from glm5fn.tree import tree_map

LAYOUTS = {
    "one": MeshConfig(),
    "dp2": GRIDS["shard 2"],
    "dp4": GRIDS["shard 4"],
    "dp2-ep2": GRIDS["ep 2"],
    "cp2": GRIDS["cp 2"],
    "dp4-ep2": GRIDS["shard 4 x ep 2"],
    "hsdp4": GRIDS["replicate 2 x shard 2"],
}
SPLIT = {
    "tp2": GRIDS["tp 2"],
    "dp2-tp2": GRIDS["shard 2 x tp 2"],
    "tp2-ep2": GRIDS["shard 2 x tp 2 x ep 2, in experts"],
}
STORES = ["safetensors", "tensorstore"]


def steps(setup, state, count):
    for _ in range(count):
        state, _ = step.step(setup, state, stop=False)
    return state


def tree(state):
    """All of it, in memory that no later step changes."""
    return tree_map(torch.clone, gathered({"params": state.params, "moments": state.moments}))


def written(grid, root, stores, model="all"):
    """Two steps, then a checkpoint in each store."""
    setup, state = make(grid, optimizer="adamw", **MODELS[model])
    state = steps(setup, state, 2)
    for store in stores:
        save(root / store, state, dump(setup.run), store=store)
    return tree(state)


def read(grid, path, model):
    """What was read, and what became of it in five steps."""
    setup, _ = make(grid, optimizer="adamw", **MODELS[model])
    state = checkpoint.restore(path, setup.run, grid_of(grid), "cpu")
    return tree(state), (state.step, state.samples), tree(steps(setup, state, 5))


@cache
def straight(model):
    """Seven steps of one process."""
    setup, state = make(MeshConfig(), optimizer="adamw", **MODELS[model])
    return tree(steps(setup, state, 7))


def on(pools, name, function, *args):
    grid = (LAYOUTS | SPLIT)[name]
    return [function(grid, *args)] if grid.world == 1 else pools(grid.world)(function, grid, *args, timeout=300)


def check(pools, expected, path, reads, model="all"):
    for found, place, after in on(pools, reads, read, path, model):
        assert place == (2, 8)
        found, wanted = flatten(found), flatten(expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(leaf, wanted[key]) for key, leaf in found.items())
        assert distance(after, straight(model)) < 1e-9


# Each layout is written or read: those without ep by a model without experts.
CELLS = [("dense", *pair) for pair in (("one", "dp4"), ("cp2", "hsdp4"), ("hsdp4", "dp2"))]
CELLS += [("all", "dp2-ep2", "dp4-ep2"), ("dense, split", "tp2", "one"), ("dense, split", "dp2", "tp2")]


@pytest.mark.parametrize(("model", "wrote", "reads"), CELLS, ids=[f"{wrote} -> {reads}" for _, wrote, reads in CELLS])
def test_a_checkpoint_of_one_layout_goes_on_on_another(model, wrote, reads, pools, tmp_path):
    store = STORES[list(LAYOUTS | SPLIT).index(wrote) % 2]
    expected = on(pools, wrote, written, tmp_path, [store], model)[0]
    check(pools, expected, tmp_path / store / "step_00000002", reads, model)


WITH_SPLIT = ("one", "dp2", *SPLIT)
PAIRS = dict.fromkeys((*product(LAYOUTS, LAYOUTS), *product(WITH_SPLIT, WITH_SPLIT)))


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "reads"), PAIRS, ids=[f"{wrote} -> {reads}" for wrote, reads in PAIRS])
def test_a_checkpoint_of_any_layout_goes_on_on_any_other(wrote, reads, pools, tmp_path):
    expected = on(pools, wrote, written, tmp_path, STORES)[0]
    for store in STORES:
        check(pools, expected, tmp_path / store / "step_00000002", reads)


def parts(grid):
    """Of each tensor, how many elements all its parts have, and how many it has."""
    _, state = make(grid)
    found = [held(leaf) for leaf in flatten(state.params).values()]
    return [(sum(prod(n for _, n in region) for _, region in each.parts), prod(each.shape)) for each in found]


@pytest.mark.parametrize("name", ["replicate 2", "shard 2"])
def test_of_copies_one_is_written(name, pools):
    assert all(own == whole for rank in pools(2)(parts, GRIDS[name]) for own, whole in rank)


def test_each_rank_owns_files_of_its_own_and_together_they_are_the_item(pools, tmp_path):
    expected = on(pools, "dp4", written, tmp_path, ["safetensors"])[0]
    path = tmp_path / "safetensors" / "step_00000002"
    files = sorted(file.name for file in path.glob("params-*.safetensors"))
    assert files == [f"params-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    sizes = [(path / name).stat().st_size for name in files]
    assert max(sizes) < 1.5 * min(sizes)
    found, wanted = open_item(path, "params"), flatten(expected["params"])
    assert found.rows.keys() == wanted.keys()
    assert all(torch.equal(found.read(key), leaf) for key, leaf in wanted.items())
