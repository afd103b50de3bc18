"""Ranks that have less to do than others, and runs that go on on every grid from what they saved."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_layouts import (
    ALL,
    GRIDS,
    assert_near,
    evaluated,
    gathered,
    grid_of,
    make,
    packed_gradient,
    run_three_steps,
    samples,
    three_steps,
)
from tiny import distance
from training import save

from glm5fn import checkpoint, flatten, mesh, step
from glm5fn.settings import MeshConfig, dump

EXPERTS = ["ep 2", "cp 2 x ep 2", "shard 4 x ep 2", "shard 2 x cp 2 x ep 4", "replicate 2 x shard 2 x ep 2"]


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(name, marks=() if name in ("ep 2", "shard 2 x cp 2 x ep 4") else pytest.mark.slow)
        for name in EXPERTS
    ],
)
def test_all_tokens_may_go_to_the_experts_of_one_rank(grid, pools):
    grid = GRIDS[grid]
    records, params, _ = three_steps(MeshConfig(), 4, favoured=2, **ALL)
    assert records[0]["dead_experts"] == 6 * 2  # of 8, in one layer and one of the further token's
    settings = {"micro": 2 if grid.cp > 1 else 1, "favoured": 2, **ALL}
    for found, found_params, _ in pools(grid.world)(run_three_steps, grid, settings):
        for one, other in zip(found, records, strict=True):
            assert_near(one, other, 1e-12)
        assert distance(found_params, params) < 1e-12


@pytest.mark.parametrize("grid", ["ep 2", "shard 2 x cp 2 x ep 4"])
def test_a_rank_of_padding_alone_takes_part_and_changes_nothing(grid, pools):
    expected, count, _ = packed_gradient(MeshConfig(), 24, 2)
    for found, counted, _ in pools(GRIDS[grid].world)(packed_gradient, GRIDS[grid], 24, 2):
        assert counted == count and distance(found, expected) < 1e-9


@pytest.mark.parametrize("grid", ["ep 2", "shard 4 x ep 2", "shard 2 x cp 2 x ep 4"])
def test_fewer_held_out_rows_than_ranks_are_evaluated_by_all(grid, pools):
    rows = samples((17,))
    expected = evaluated(MeshConfig(), rows, ALL)
    for found in pools(GRIDS[grid].world)(evaluated, GRIDS[grid], rows, ALL):
        assert all(math.isclose(found[name], value, rel_tol=1e-12) for name, value in expected.items())


def with_bad_data(grid):
    """What each rank says if the data of the last one cannot be read."""
    setup, state = make(grid, optimizer="adamw", **ALL)

    def load(start):
        raise mesh.RunError("shard_00001: has token 300")

    setup = replace(setup, load=load) if mesh.rank() == grid.world - 1 else setup
    with pytest.raises(mesh.RunError) as error:
        step.step(setup, state, stop=False)
    return str(error.value)


@pytest.mark.parametrize("grid", ["shard 2", "cp 2 x ep 2"])
def test_data_that_one_rank_cannot_read_end_the_run_on_all(grid, pools):
    assert pools(2)(with_bad_data, GRIDS[grid]) == ["shard_00001: has token 300"] * 2


def straight_and_resumed(grid, root: Path):
    """Six steps, and the last three of them again from what was saved after the third: records and state."""
    setup, state = make(grid, optimizer="adamw", recompute="layer", micro=2 if grid.cp > 1 else 1, **ALL)
    ends = []
    for start in (0, 3):
        if start:
            state = checkpoint.restore(root / "step_00000003", setup.run, grid_of(grid), "cpu")
        records = []
        while state.step < 6:
            if state.step == 3 and not start:
                save(root, state, dump(setup.run))
            state, record = step.step(setup, state, stop=False)
            records.append(record)
        ends.append((records[-3:], flatten(gathered({"params": state.params, "moments": state.moments}))))
    return ends


QUICK = ("ep 2",)
EACH_GRID = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GRIDS]


@pytest.mark.parametrize("grid", EACH_GRID)
def test_a_run_that_goes_on_on_any_grid_has_the_bits_of_one_that_did_not_stop(grid, pools, tmp_path):
    for (records, state), (again, resumed) in pools(GRIDS[grid].world)(straight_and_resumed, GRIDS[grid], tmp_path):
        assert [record["step"] for record in records] == [4, 5, 6] and again == records
        assert resumed.keys() == state.keys()
        assert all(torch.equal(leaf, state[path]) for path, leaf in resumed.items())
