"""The routers' balance bias in whole steps: exact counts, moved once, alike however the step was cut (CASES B8)."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_layouts import ALL, GRIDS, gathered, make, poisoned_step, samples
from tiny import random_params

import glm5fn.block
from glm5fn import flatten, forward_mtp, mesh, step
from glm5fn.settings import IndexerConfig, MeshConfig, MTPConfig, OptimConfig, RouterConfig

F64 = torch.float64
RATE = 0.01
LENGTH = 41
MODEL = ALL["model"]
LAYERS = ("layers.1", "mtp.0")
SETTINGS = {
    "model": MODEL,
    "indexer": IndexerConfig(stage="sparse"),
    "router": RouterConfig(bias_rate=RATE),
    "mtp": MTPConfig(coef=0.1),
}
ROWS = samples((1, 5, 17, 40), LENGTH)
HALF = samples((1, 5, 17, 40), LENGTH)
HALF.tokens[:, 20:], HALF.targets[:, 20:] = 3, -100  # what is padding in half of the row


def routers(params):
    """The bias of each layer with experts."""
    flat = flatten(params)
    return {layer: flat[f"{layer}.ffn.router_bias"] for layer in LAYERS}


def loads(padded=False):
    """How many tokens each expert must get in the first step, counted here in a forward pass of the whole batch."""
    params, choices = random_params(MODEL, dtype=F64), []
    tokens = torch.from_numpy(ROWS.tokens[:, :20] if padded else ROWS.tokens)
    route = glm5fn.block.route

    def recorded(*args, **kwargs):
        choices.append(route(*args, **kwargs).chosen)
        return route(*args, **kwargs)

    with patch("glm5fn.block.route", recorded):
        forward_mtp(params, tokens, MODEL)
    steps = tokens.shape[1]
    main, one, two = (chosen.numpy() for chosen in choices)
    counted = {
        "layers.1": np.bincount(main.ravel(), minlength=8),
        "mtp.0": np.bincount(np.concatenate((one[:, : steps - 1].ravel(), two[:, : steps - 2].ravel())), minlength=8),
    }
    assert counted["layers.1"].sum() == 2 * 4 * steps
    return counted


def one_step(grid, micro, recompute, evaluates, padded):
    """The biases before and after a step, and the loads that moved them."""
    setup, state = make(grid, micro, rows=HALF if padded else ROWS, recompute=recompute, **SETTINGS)
    before = {layer: bias.clone() for layer, bias in routers(gathered(state.params)).items()}
    load, balance, seen = setup.load, step.balance, []

    def watched(params, load, *rest):
        seen.append(flatten(load))
        return balance(params, load, *rest)

    def with_padding(start):
        segments = (torch.arange(LENGTH) < 20).long()
        return [batch | {"segments": segments.expand_as(batch["tokens"])} for batch in load(start)]

    if evaluates:
        step.evaluate(setup, state.params)
    with patch.object(step, "balance", watched):
        state, _ = step.step(step.replace(setup, load=with_padding if padded else load), state, stop=False)
    if evaluates:
        step.evaluate(setup, state.params)
    (load,) = seen
    return before, routers(gathered(state.params)), load


@pytest.fixture(scope="module")
def wanted():
    return {padded: loads(padded) for padded in (False, True)}


def check(found, counted):
    before, after, loads = found
    for layer, bias in before.items():
        assert loads[layer].tolist() == counted[layer].tolist(), layer
        step = RATE * torch.from_numpy(np.sign(counted[layer].mean() - counted[layer]))
        assert torch.equal(after[layer], bias + step), layer
        assert step.any() and after[layer].dtype == F64


@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "half a row of padding"])
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_moves_each_bias_once_by_the_loads_of_the_whole_batch(micro, recompute, evaluates, padded, wanted):
    check(one_step(MeshConfig(), micro, recompute, evaluates, padded), wanted[padded])


def cells(grid, settings):
    return [one_step(grid, *setting) for setting in settings]


def test_two_ranks_move_each_bias_as_one_does(pools, wanted):
    settings = [(1, "layer", False, False), (2, "none", True, True)]
    for found in pools(2)(cells, GRIDS["shard 2"], settings):
        for one, (*_, padded) in zip(found, settings, strict=True):
            check(one, wanted[padded])


def test_each_step_in_bf16_moves_each_bias_as_fp32_addition_does():
    setup, state = make(MeshConfig(), precision="bf16", dtype=torch.float32, **SETTINGS | {"router": RouterConfig()})
    expected = {}
    for layer, bias in routers(state.params).items():
        bias.copy_(6.8 + 0.001 * torch.arange(8))
        expected[layer] = bias.numpy().copy()
    dtypes, seen, balance, route = set(), [], step.balance, glm5fn.block.route

    def recorded(params, load, *rest):
        seen.append(flatten(load))
        return balance(params, load, *rest)

    def watched(params, x, *args, **kwargs):
        dtypes.add((x.dtype, params["router_bias"].dtype))
        return route(params, x, *args, **kwargs)

    with patch.object(step, "balance", recorded), patch("glm5fn.block.route", watched):
        for _ in range(3):
            state, _ = step.step(setup, state, stop=False)
    assert dtypes == {(torch.bfloat16, torch.float32)}
    for load in seen:
        for layer, bias in expected.items():
            assert not load[layer].is_floating_point()
            bias += np.float32(0.001) * np.sign(load[layer].numpy().mean() - load[layer].numpy()).astype(np.float32)
    for layer, bias in routers(state.params).items():
        assert bias.dtype == torch.float32 and bias.numpy().tobytes() == expected[layer].tobytes()


def test_neither_the_optimizer_nor_a_rate_of_zero_moves_a_bias():
    settings = SETTINGS | {"router": RouterConfig(bias_rate=0.0, balance_coef=1.0)}
    setup, state = make(MeshConfig(), optimizer="adamw", **settings)
    setup = step.replace(setup, run=step.replace(setup.run, optim=OptimConfig(lr=0.1, weight_decay=0.9)))
    before = {layer: bias.clone() for layer, bias in routers(state.params).items()}
    assert not any("router_bias" in path for path in flatten(state.moments))
    state, _ = step.step(setup, state, stop=False)
    assert all(torch.equal(bias, before[layer]) for layer, bias in routers(state.params).items())


@pytest.mark.parametrize("why", ["gradient", "labels"])
def test_a_step_that_is_skipped_moves_no_bias(why):
    if why == "gradient":
        assert poisoned_step(MeshConfig(), SETTINGS)[:2] == (1, 0.0)
        return
    setup, state = make(MeshConfig(), rows=samples((0, 0, 0, 0)), **SETTINGS)
    before = {layer: bias.clone() for layer, bias in routers(state.params).items()}
    state, record = step.step(setup, state, stop=False)
    assert record["skipped"] == 1 and record["load_max"] > 1
    assert all(torch.equal(bias, before[layer]) for layer, bias in routers(state.params).items())


def fetched_dtypes(grid):
    """The dtype in which each wide tensor is held and handed to a layer, while others are in bf16."""
    setup, state = make(grid, precision="bf16", dtype=torch.float32, **SETTINGS)
    held = {path: mesh.local_part(leaf).dtype for path, leaf in flatten(state.params).items()}
    given = {path: leaf.dtype for path, leaf in flatten(setup.comm.fetch(state.params, setup.specs)).items()}
    return {path: (held[path], dtype) for path, dtype in given.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_the_bias_and_the_indexers_head_weights_are_never_in_bf16(world, pools):
    answers = [fetched_dtypes(MeshConfig())] if world == 1 else pools(2)(fetched_dtypes, GRIDS["shard 2"])
    for found in answers:
        wide = {path for path, dtypes in found.items() if dtypes == (torch.float32, torch.float32)}
        assert wide == {path for path in found if path.endswith(("router_bias", "indexer.weights"))} and len(wide) == 4
        assert {dtypes for path, dtypes in found.items() if path not in wide} == {(torch.float32, torch.bfloat16)}
