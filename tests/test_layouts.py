"""Every layout against one process: loss, gradients, norm, weights; and what each exchange may cost."""

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from tiny import GLM5, distance, random_batch, random_params, tiny
from training import save

from configs import LAYOUTS
from glm5fn import fetch, flatten, mesh, step
from glm5fn.block import block
from glm5fn.checkpoint import State
from glm5fn.collectives import chunk_order, comm_for, parts_of
from glm5fn.data import Data, Samples, micro_batches
from glm5fn.kernels import TORCH
from glm5fn.losses import counts, loss
from glm5fn.model import model_specs
from glm5fn.optim import grad_norm, init_moments
from glm5fn.settings import DataConfig, IndexerConfig, MeshConfig, MTPConfig, OptimConfig, RouterConfig, RunConfig, dump
from glm5fn.spec import trained
from glm5fn.tree import tree_map, unflatten

F64 = torch.float64
GRIDS = {
    "shard 2": MeshConfig(dp_shard=2),
    "replicate 2": MeshConfig(dp_replicate=2),
    "shard 4": MeshConfig(dp_shard=4),
    "replicate 2 x shard 2": MeshConfig(dp_replicate=2, dp_shard=2),
}
EACH_DENSE_GRID = pytest.mark.parametrize("grid", [*GRIDS.values()], ids=[*GRIDS])
DENSE_CELLS = [("dense", name) for name in GRIDS]
FURTHER = {  # of models with experts, and of rows that several ranks share
    "ep 2": MeshConfig(dp_shard=2, ep=2),
    "cp 2": MeshConfig(cp=2),
    "cp 2, contiguous": MeshConfig(cp=2, cp_split="contiguous"),
    "cp 2 x ep 2": MeshConfig(cp=2, ep=2),
    "cp 4": MeshConfig(cp=4),
    "shard 2 x cp 2": MeshConfig(dp_shard=2, cp=2),
    "shard 4 x ep 2": MeshConfig(dp_shard=4, ep=2),
    "shard 2 x cp 2 x ep 4": MeshConfig(dp_shard=2, cp=2, ep=4),
    "replicate 2 x shard 2 x ep 2": MeshConfig(dp_replicate=2, dp_shard=2, ep=2),
    "replicate 2 x cp 2": MeshConfig(dp_replicate=2, cp=2),
}
SPLIT = {  # of blocks that several ranks compute
    "tp 2": MeshConfig(tp=2),
    "tp 4": MeshConfig(tp=4),
    "shard 2 x tp 2": MeshConfig(dp_shard=2, tp=2),
    "replicate 2 x tp 2": MeshConfig(dp_replicate=2, tp=2),
    "cp 2 x tp 2": MeshConfig(cp=2, tp=2),
}
SPLIT_EXPERTS = {
    "tp 2, in experts": MeshConfig(tp=2, tp_experts="ffn"),
    "tp 4, in experts": MeshConfig(tp=4, tp_experts="ffn"),
    "shard 2 x tp 2 x ep 2": MeshConfig(dp_shard=2, tp=2, ep=2),
    "shard 2 x tp 2 x ep 2, in experts": MeshConfig(dp_shard=2, tp=2, ep=2, tp_experts="ffn"),
    "cp 2 x tp 2 x ep 2": MeshConfig(cp=2, tp=2, ep=2),
    "cp 2 x tp 2 x ep 2, contiguous, in experts": MeshConfig(cp=2, tp=2, ep=2, cp_split="contiguous", tp_experts="ffn"),
}
GRIDS |= FURTHER | SPLIT | SPLIT_EXPERTS


def samples(counts, steps=41, seed=5):
    """One row for each count, with so many labels; the model has 29 tokens."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 29, (2, len(counts), steps))
    for row, count in zip(targets, counts, strict=True):
        row[count:] = -100
    return Samples(tokens, targets)


ROWS = samples((1, 5, 17, 40))
SMALL = {"n_routed_experts": 8, "num_hidden_layers": 2, "index_topk_freq": 1, "indexer_types": ("full", "shared")}
HEADS = {"num_attention_heads": 4, "intermediate_size": 28, "vocab_size": 32}  # sizes that four ranks can share
# A model with all there is, and every term of the loss.
ALL = {
    "model": tiny(**GLM5 | SMALL | HEADS),
    "indexer": IndexerConfig(stage="sparse", coef=0.7, teacher="served"),
    "router": RouterConfig(bias_rate=0.01, balance_coef=0.2, z_coef=0.05),
    "mtp": MTPConfig(coef=0.4),
}
MODELS = {"dense": {}, "deep": {"model": tiny(num_hidden_layers=11)}, "all": ALL}
MODELS |= {
    "dense, split": {"model": tiny(**HEADS | {"num_attention_heads": 8, "num_key_value_heads": 4})},
    "tied, split": {"model": tiny(**HEADS | {"num_key_value_heads": 4, "tie_word_embeddings": True})},
}
MODELS["warm-up"] = {"model": ALL["model"], "indexer": IndexerConfig(stage="dense-warmup", teacher="served")}
DEEP = GLM5 | HEADS | {"n_routed_experts": 8, "num_hidden_layers": 12, "index_topk_freq": 4, "indexer_types": ()}
DEEP = tiny(**DEEP)
PACKED = [name for name in FURTHER if name not in ("shard 2 x cp 2", "shard 4 x ep 2")] + ["cp 2 x tp 2 x ep 2"]
MORE = ["tp 2", "tp 4, in experts", "cp 2 x tp 2 x ep 2, contiguous, in experts"]
SLOW = [*product(MORE, (24, 23)), *((name, 24) for name in PACKED if GRIDS[name].world > 2)]
PACKED = [
    pytest.param(*cell, marks=pytest.mark.slow if cell in SLOW else ()) for cell in product((*PACKED, *MORE), (24, 23))
]
CELLS = [*DENSE_CELLS, ("all", "replicate 2 x shard 2"), *(("all", name) for name in FURTHER)]
SPLIT_CELLS = [("tied, split", "tp 2"), *(("dense, split", name) for name in SPLIT)]
SPLIT_CELLS += [("all", name) for name in (*SPLIT, *SPLIT_EXPERTS)]
QUICK = (
    ("tied, split", "tp 2"),
    ("dense, split", "tp 4"),
    ("all", "tp 2"),
    ("all", "cp 2 x tp 2 x ep 2, contiguous, in experts"),
    ("all", "cp 4"),
)


def some_slow(cells, quick=QUICK):
    """Cells that begin with (model, grid); of those that split blocks, and cp 4, all but the quick ones are slow."""
    slow = [cell[:2] in (*SPLIT_CELLS, ("all", "cp 4")) and cell[:2] not in quick for cell in cells]
    return [pytest.param(*cell, marks=pytest.mark.slow if late else ()) for cell, late in zip(cells, slow, strict=True)]


@cache  # each has groups of its own, and these have threads
def grid_of(grid):
    return mesh.make_grid(grid, "cpu")


def make(grid, micro=1, optimizer="sgd", rows=ROWS, model=None, dtype=F64, favoured=0, **settings):
    """A set-up run and its first state, on this rank's part of the grid. favoured: experts that every token chooses."""
    cfg = model or tiny()
    config = RunConfig(
        name="test",
        model=cfg,
        layout=LAYOUTS["fsdp"],
        mesh=grid,
        data=DataConfig(seq_len=41, global_batch=4, micro_batch=micro),
        optim=OptimConfig(name=optimizer, lr=0.1 if optimizer == "sgd" else 1e-3, warmup_steps=0, clip=0.1),
        **settings,
    )
    data = Data(train=[rows], held_out=rows, seed=None)
    made = grid_of(grid)
    wide = F64 if config.deterministic else dtype
    compute = torch.bfloat16 if config.precision == "bf16" else dtype
    comm = comm_for(made, compute, wide)
    setup = step.Setup(
        run=config,
        device="cpu",
        data=data,
        load=partial(micro_batches, data, config.data, *mesh.data_rank(grid)),
        comm=comm,
        specs=model_specs(cfg),
        trained=tuple(trained(model_specs(cfg), config.indexer.stage, config.mtp_depths)),
        loss=partial(loss, cfg=cfg, comm=comm, terms=config.terms, recompute=config.recompute == "layer"),
    )
    whole = flatten(random_params(cfg, dtype=dtype))
    for path in whole if favoured else ():
        if path.endswith("router_bias"):
            whole[path][:favoured] += 100

    def read(path, row, region):
        return whole[path][tuple(slice(start, start + size) for start, size in region)].clone()

    params = mesh.place(model_specs(cfg), cfg.dims, made, config.layout, read)
    learning = unflatten({path: flatten(params)[path] for path in setup.trained})
    return setup, State(params=params, moments=init_moments(learning, config.optim))


def gathered(tree):
    return tree_map(mesh.whole_tensor, tree)


def first_gradient(grid, micro, settings, compiled=False):
    setup, state = make(grid, micro, **settings)
    if compiled:
        torch._dynamo.reset()
        setup = replace(setup, loss=partial(setup.loss, block=torch.compile(block, backend="aot_eager")))
    batches = setup.load(0)
    own = [counts(batch, setup.run.model, setup.comm) for batch in batches]
    count = {name: int(setup.comm.sum(sum(part[name] for part in own))) for name in own[0]}
    _, grads = step.gradient(setup, state.params, batches, count)
    return gathered(grads) | {"all of it": grad_norm(grads, setup.comm)}


@cache
def gradient_of_one_process(model, micro):
    return first_gradient(MeshConfig(), micro, MODELS[model])


def packed(steps, bare=0):
    """Four rows of documents, the last of them padding in part, with a fifth of the labels masked.

    bare: so many of the last rows are padding alone.
    """
    batch = random_batch(tiny(), 4, steps)
    lengths = [(steps,), (7, 9, steps - 16), (1, 12, steps - 13), (11, 2)]
    segments = torch.zeros(4, steps, dtype=torch.long)
    for row, parts in zip(segments, lengths, strict=True):
        at = 0
        for number, length in enumerate(parts, 1):
            row[at : at + length], at = number, at + length
    segments[4 - bare :] = 0
    return batch | {"segments": segments, "targets": batch["targets"].masked_fill(segments == 0, -100)}


def packed_gradient(grid, steps, bare=0):
    """The sums of the loss's parts, every gradient, and the keys and experts that were chosen, of twelve layers."""
    setup, state = make(grid, model=DEEP, **{name: ALL[name] for name in ("indexer", "router", "mtp")})
    seen = {"keys": [], "experts": []}

    def select(*args):
        chosen = TORCH.select(*args)
        seen["keys"].append(chosen)
        return chosen

    def experts(kernel, x, chosen, *rest):
        seen["experts"].append(chosen)
        return setup.comm.experts(kernel, x, chosen, *rest)

    comm = replace(setup.comm, experts=experts)
    setup = replace(setup, loss=partial(setup.loss, comm=comm, kernels=TORCH._replace(select=select)))
    rank, ranks = mesh.data_rank(grid)
    mine = {name: part.chunk(ranks)[rank] for name, part in packed(steps, bare).items()}
    count = {name: int(setup.comm.sum(part)) for name, part in counts(mine, DEEP, setup.comm).items()}
    sums, grads = step.gradient(setup, state.params, [mine], count)
    return {"sums": tree_map(lambda part: part.double(), sums), **gathered(grads)}, count, seen


@cache
def packed_gradient_of_one_process(*args):
    return packed_gradient(MeshConfig(), *args)


@pytest.mark.parametrize(("grid", "steps"), PACKED)
def test_packed_rows_in_twelve_layers_have_the_loss_gradients_and_choices_of_one_process(grid, steps, pools):
    expected, count, seen = packed_gradient_of_one_process(steps)
    grid = GRIDS[grid]
    results = pools(grid.world)(packed_gradient, grid, steps)
    for found, counted, _ in results:
        assert counted == count and distance(found, expected) < 1e-9
    order, share = chunk_order(grid.cp, grid.cp_split == "balanced"), 4 // grid.data_ranks
    whole, spans = torch.arange(steps + -steps % parts_of(order, grid.tp)), len(order[0])
    whole = whole.chunk(len(order) * spans)
    for rank, (_, _, own) in enumerate(results):
        places = torch.cat([whole[number] for number in order[rank // grid.tp % grid.cp]])
        part, first = places.chunk(grid.tp)[rank % grid.tp], rank // (grid.cp * grid.tp) * share

        def of_rank(chosen, at, first=first):
            return chosen.view(4, steps, -1)[first : first + share][:, at[at < steps]]

        for ours, all_of in zip(own["experts"], seen["experts"], strict=True):
            assert torch.equal(ours.view(share, len(part), -1)[:, part < steps], of_rank(all_of, part))
        keys = [F.pad(chosen, (0, DEEP.index_topk - chosen.shape[-1]), value=-1) for chosen in own["keys"]]
        for i, all_of in enumerate(seen["keys"]):
            ours = torch.cat(keys[i * spans : (i + 1) * spans], 1)
            assert torch.equal(ours[:, places < steps], of_rank(all_of, places))


def three_steps(grid, *args, **settings):
    """The records, parameters and first moments; moments are there for what learns alone."""
    setup, state = make(grid, *args, **settings)
    records = []
    for _ in range(3):
        state, record = step.step(setup, state, stop=False)
        records.append(record)
    return records, gathered(state.params), gathered(state.moments.get("mean", {}))


@cache
def three_steps_of_one_process(model, optimizer):
    return three_steps(MeshConfig(), 4, optimizer, **MODELS[model])


def assert_near(record, other, tolerance):
    """Two records of a step, whose gradient norms are rounded to fp32."""
    assert record.keys() == other.keys()
    for name, value in record.items():
        limit = max(tolerance, 2e-7) if name == "grad_norm" else tolerance
        assert math.isclose(value, other[name], rel_tol=limit), (name, value, other[name])


def run_three_steps(grid, settings):
    return three_steps(grid, **settings)


EQUAL = [*((*cell, 1) for cell in CELLS + SPLIT_CELLS), ("deep", "shard 2", 4), ("warm-up", "tp 2", 1)]


@pytest.mark.parametrize(("model", "grid", "micro"), some_slow(EQUAL))
def test_every_gradient_and_the_norm_equal_those_of_one_process(model, grid, micro, pools):
    expected = gradient_of_one_process(model, micro)
    micro = 2 if GRIDS[grid].cp > 1 else 1
    for found in pools(GRIDS[grid].world)(first_gradient, GRIDS[grid], micro, MODELS[model]):
        assert distance(found, expected) < 1e-12
    parts = [leaf.square().sum() for path, leaf in flatten(expected).items() if path != "all of it"]
    assert all(parts)
    torch.testing.assert_close(expected["all of it"], torch.stack(parts).sum().sqrt(), rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "recompute"),
    [("ep 2", "none"), ("cp 2 x ep 2", "none"), ("tp 2", "layer"), ("tp 2, in experts", "layer")],
)
def test_the_compiled_block_gives_the_gradients_of_one_process(grid, recompute, pools):
    expected, settings = gradient_of_one_process("all", 1), ALL | {"recompute": recompute}
    micro = 2 if GRIDS[grid].cp > 1 else 1
    for found in pools(2)(first_gradient, GRIDS[grid], micro, settings, True, timeout=300):
        assert distance(found, expected) < 1e-12


PLAIN, LATER = ("sgd", "none"), ("adamw", "layer")
STEPS = [(*cell, *how) for cell in DENSE_CELLS for how in (PLAIN, LATER)]
STEPS += [("all", "shard 2", *PLAIN), ("all", "replicate 2 x shard 2", *LATER)]
STEPS += [("all", name, *how) for name, how in zip(FURTHER, cycle((PLAIN, ("sgd", "layer"), LATER)))]
STEPS += [(*cell, *how) for cell, how in zip(SPLIT_CELLS, cycle((PLAIN, ("sgd", "layer"), LATER)))]


@pytest.mark.parametrize(("model", "grid", "optimizer", "recompute"), some_slow(STEPS, QUICK[1:3]))
def test_three_clipped_steps_equal_those_of_one_process(model, grid, optimizer, recompute, pools):
    grid = GRIDS[grid]
    records, params, means = three_steps_of_one_process(model, optimizer)
    assert all(record["grad_norm"] > 0.1 for record in records)  # so clipping is active
    terms = {"mtp_1", "mtp_2", "kl", "balance", "z", "load_max", "dead_experts"}
    assert terms <= records[0].keys() or model != "all"
    settings = {"optimizer": optimizer, "recompute": recompute, "micro": 2 if grid.cp > 1 else 1, **MODELS[model]}
    for found, found_params, found_means in pools(grid.world)(run_three_steps, grid, settings):
        for one, other in zip(found, records, strict=True):
            assert_near(one, other, 1e-12)
        assert distance(found_params, params) < 1e-12
        for path, leaf in flatten(found_params).items():
            assert "router_bias" not in path or torch.equal(leaf, flatten(params)[path])
        assert not means or distance(found_means, means) < 1e-11


BITWISE = {
    "fp32": {"precision": "fp32", "model": tiny(hidden_size=42)},
    "bf16, tied": {"precision": "bf16", "model": tiny(hidden_size=42, tie_word_embeddings=True)},
    "fp32, all": {"precision": "fp32", **ALL},
    "bf16, all": {"precision": "bf16", **ALL},
}
BITWISE_CELLS = [(name, grid) for name in ("fp32", "bf16, tied") for _, grid in DENSE_CELLS] + [
    ("bf16, all", "shard 2"),
    ("bf16, all", "ep 2"),
    ("fp32, all", "replicate 2 x shard 2 x ep 2"),
]


@pytest.mark.parametrize(("name", "grid"), BITWISE_CELLS)
def test_deterministic_steps_equal_those_of_one_process_to_the_bit(name, grid, pools):
    grid, settings = GRIDS[grid], {"optimizer": "adamw", "dtype": torch.float32, "deterministic": True, **BITWISE[name]}
    records, params, means = three_steps(MeshConfig(), **settings)
    for found, found_params, found_means in pools(grid.world)(run_three_steps, grid, settings):
        assert found == records
        for one, other in ((found_params, params), (found_means, means)):
            assert all(torch.equal(leaf, flatten(other)[path]) for path, leaf in flatten(one).items())


@EACH_DENSE_GRID
def test_by_default_fp32_steps_differ_by_rounding_alone(grid, pools):
    records, params, _ = three_steps(MeshConfig(), dtype=torch.float32)
    for found, found_params, _ in pools(grid.world)(run_three_steps, grid, {"dtype": torch.float32}):
        assert all(abs(one["loss"] - other["loss"]) < 2e-6 for one, other in zip(found, records, strict=True))
        assert distance(found_params, params) < 1e-6


def test_a_rank_whose_rows_have_no_label_changes_nothing(pools):
    rows = samples((0, 5, 0, 40))
    expected = three_steps(MeshConfig(), rows=rows)
    for found in pools(4)(run_three_steps, MeshConfig(dp_shard=4), {"rows": rows}):
        assert [record["skipped"] for record in found[0]] == [0, 0, 0]
        assert distance(found[1], expected[1]) < 1e-12


def test_a_step_without_any_label_is_skipped_by_all_ranks(pools):
    for found in pools(2)(run_three_steps, MeshConfig(dp_shard=2), {"rows": samples((0, 0, 0, 0))}):
        assert [record["skipped"] for record in found[0]] == [1, 2, 3]
        assert distance(found[1], random_params(tiny(), dtype=F64)) == 0


def poisoned_step(grid, settings):
    """A step in which the last rank alone meets a gradient that is not finite."""
    setup, state = make(grid, optimizer="adamw", **settings)

    def poison(params, batch, **settings):
        value, metrics = setup.loss(params, batch, **settings)
        return (value * math.nan if mesh.rank() == mesh.world() - 1 else value), metrics

    before = gathered(state.params)
    state, record = step.step(replace(setup, loss=poison), state, stop=False)
    updates = {int(count) for count in flatten(state.moments["updates"]).values()}
    return record["skipped"], distance(gathered(state.params), before), updates, state.step


@pytest.mark.parametrize(("model", "grid"), [*CELLS[:4], ("all", "shard 2")])
def test_one_gradient_that_is_not_finite_skips_the_step_on_all_ranks(model, grid, pools):
    world = GRIDS[grid].world
    assert pools(world)(poisoned_step, GRIDS[grid], MODELS[model]) == [(1, 0.0, {0}, 1)] * world


def asked_to_stop(grid):
    setup, state = make(grid)
    return step.step(setup, state, stop=mesh.rank() == 1)


def test_a_rank_that_is_asked_to_stop_stops_all_before_the_same_step(pools):
    assert pools(2)(asked_to_stop, MeshConfig(dp_shard=2)) == [None, None]


def evaluated(grid, rows, settings=None):
    setup, state = make(grid, rows=rows, **settings or {})
    return step.evaluate(setup, state.params)


@pytest.mark.parametrize("grid", [GRIDS["shard 2"], GRIDS["shard 4"]], ids=["2", "4"])
def test_evaluation_counts_each_row_once_on_any_number_of_ranks(grid, pools):
    rows = samples((1, 5, 17, 40, 8, 3, 20))
    expected = evaluated(MeshConfig(), rows)
    for found in pools(grid.world)(evaluated, grid, rows):
        assert all(math.isclose(found[name], value, rel_tol=1e-12) for name, value in expected.items())


def traffic_of_a_gradient(grid):
    """The exchanges of one micro-batch's gradient: kind and number of elements that go in, those of bytes in bytes."""
    setup, state = make(grid, model=tiny(hidden_size=24))
    batches = setup.load(0)
    calls, kinds = [], ("all_gather_into_tensor", "all_to_all_single", "all_reduce")
    with ExitStack() as stack:
        for kind in kinds:
            real, sent = getattr(dist, kind), -1 if kind == "all_reduce" else 1

            def counted(*args, real=real, kind=kind, sent=sent, **kwargs):
                calls.append((kind, args[max(sent, 0)].numel()))
                return real(*args, **kwargs)

            stack.enter_context(patch.object(fetch.dist, kind, counted))
        step.gradient(setup, state.params, batches[:1], {"labels": 63})
    return calls, {path: leaf.numel() for path, leaf in flatten(state.params).items()}


def test_a_block_travels_in_one_exchange_and_its_gradient_is_scattered_before_the_copies_are_summed(pools):
    calls, sizes = pools(4)(traffic_of_a_gradient, MeshConfig(dp_replicate=2, dp_shard=2))[0]
    sent = {kind: [size for name, size in calls if name == kind] for kind, _ in calls}
    fetched = 5  # embedding, two layers, norm, head; all but each layer's biases and norms of heads are cut
    assert len(sent["all_gather_into_tensor"]) == len(sent["all_to_all_single"]) == fetched
    scattered = sum(sent["all_to_all_single"])
    assert scattered >= sum(size for path, size in sizes.items() if "bias" not in path)
    whole = sum(size for path, size in sizes.items() if "bias" in path)
    # Of what is scattered half is left to be summed over the copies; of biases all, over both axes; then the loss.
    assert sum(sent["all_reduce"]) <= scattered // 2 + 2 * whole + 8


def order_of_exchanges(grid):
    """What the exchanges of one gradient do, by the number in which they began, in order."""
    setup, state = make(grid)
    numbers, done = {}, []
    with ExitStack() as stack:
        for name in ("__init__", "finish", "send_back", "come_back"):
            real = getattr(fetch.Exchange, name)

            def told(exchange, *args, real=real, name=name):
                done.append((name, numbers.setdefault(id(exchange), (len(numbers), exchange))[0]))
                return real(exchange, *args)

            stack.enter_context(patch.object(fetch.Exchange, name, told))
        step.gradient(setup, state.params, setup.load(0)[:1], {"labels": 63})
    return done


def test_parameters_and_gradients_of_a_block_travel_while_the_next_one_computes(pools):
    done = pools(2)(order_of_exchanges, MeshConfig(dp_shard=2))[0]
    at = {event: place for place, event in enumerate(done)}
    during = {1: 0, 2: 1, 3: 2, 4: 2}  # by whom each begins: 0 the embedding, 1 and 2 layers, 3 the norm, 4 the head
    assert {number for _, number in done} == {0, *during}
    for number, other in during.items():
        assert at["__init__", number] < at["finish", other]
        assert at["send_back", other] < at["come_back", number]


def failing_save(grid, root):
    setup, state = make(grid)
    try:
        save(root, state, dump(setup.run))
    except RuntimeError as error:
        return str(error)


def test_a_save_that_fails_on_the_writing_rank_fails_on_all(pools, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    for found in pools(2)(failing_save, MeshConfig(dp_shard=2), tmp_path / "checkpoints"):
        assert "step_00000000 failed" in found and "File exists" in found and "/checkpoints'" in found


def sleep_forever():
    while mesh.rank() == 1:
        pass


def test_the_watchdog_ends_a_group_that_hangs():
    pool = Pool(2)
    with pytest.raises(AssertionError, match="did not answer"):
        pool(sleep_forever, timeout=3)
    assert not any(process.is_alive() for process in pool.processes)
