"""The stages of the indexers' training: what each changes, and how a run goes from one to the next."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import numbers, text, train

from configs import RUNS
from glm5fn import flatten, init_params, run, save
from glm5fn.checkpoint import newest, read_state, write_state
from glm5fn.command import parse
from glm5fn.record import read_metrics
from glm5fn.stores import print_of

SIZES = {
    "vocab-size": 261,
    "hidden-size": 24,
    "intermediate-size": 40,
    "num-hidden-layers": 3,
    "num-attention-heads": 3,
    "q-lora-rank": 10,
    "kv-lora-rank": 14,
    "qk-nope-head-dim": 6,
    "qk-rope-head-dim": 4,
    "v-head-dim": 5,
    "index-topk": 4,
    "index-n-heads": 2,
    "index-head-dim": 9,
    "index-topk-freq": 2,
    "index-skip-topk-offset": 2,
    "n-routed-experts": 7,
    "moe-intermediate-size": 12,
    "first-k-dense-replace": 1,
    "num-mtp-depths": 2,
}
GLM5 = ["--config", "glm5-tiny", *(part for name, size in SIZES.items() for part in (f"--model.{name}", str(size)))]
FLAGS = [*GLM5, "--data.seq-len", "12", "--data.global-batch", "4", "--data.micro-batch", "2"]
SCHEDULE = ["--optim.warmup-steps", "3", "--optim.decay-steps", "12", "--optim.lr", "0.01", "--optim.min-lr", "0.001"]
INDEXERS = {f"{layer}.attn.indexer" for layer in ("layers.0", "layers.1", "mtp.0")}


@pytest.fixture
def go(tmp_path, capsys):
    """`go(name, stage, steps, *flags)` trains in the directory `name`, or goes on there; returns what was said."""
    data = text(tmp_path)

    def go(name, stage, steps, *flags):
        argv = [*FLAGS, *SCHEDULE, "--data.path", data, "--out", tmp_path / name, "--resume", "auto", *flags]
        code = train(*argv, "--indexer.stage", stage, "--steps", str(steps))
        said = "".join(capsys.readouterr())
        assert code == 0, said
        return said

    return go


def weights(out):
    """Parameters and moments of a run's newest checkpoint, by path."""
    path, _ = newest(out / "checkpoints")
    return load_file(path / "params.safetensors"), load_file(path / "moments.safetensors")


def fresh():
    return flatten(init_params(parse(FLAGS, RUNS).run.model))


def moved(params, before):
    return {path for path, leaf in params.items() if not torch.equal(leaf, before[path])}


def indexers(paths):
    return {path for path in paths if ".indexer." in path}


def with_moments(moments, kind="updates"):
    return {path.removeprefix(f"{kind}.") for path in moments if path.startswith(f"{kind}.")}


def test_frozen_leaves_the_indexers_as_they_are_and_has_no_moments_for_them(go, tmp_path):
    go("x", "frozen", 3)  # an odd number of equal moves brings no bias back
    params, moments = weights(tmp_path / "x")
    assert {path.rsplit(".", 1)[0] for path in indexers(params)} == INDEXERS
    assert moved(params, fresh()) == params.keys() - indexers(params)
    trained = {path for path in params if "indexer" not in path and "router_bias" not in path}
    assert all(with_moments(moments, kind) == trained for kind in ("mean", "square", "updates"))
    assert "kl" not in read_metrics(tmp_path / "x")[0]


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_dense_warmup_changes_the_indexers_alone_and_has_moments_for_them_alone(go, tmp_path, recompute):
    go("x", "dense-warmup", 2, "--recompute", recompute)
    params, moments = weights(tmp_path / "x")
    assert moved(params, fresh()) == indexers(params)
    assert all(with_moments(moments, kind) == indexers(params) for kind in ("mean", "square", "updates"))


def test_sparse_changes_all_and_has_moments_for_all_but_the_routers_bias(go, tmp_path):
    go("x", "sparse", 3)
    params, moments = weights(tmp_path / "x")
    assert moved(params, fresh()) == params.keys()
    assert with_moments(moments) == {path for path in params if "router_bias" not in path}


@pytest.mark.parametrize("stage", ["dense-warmup", "sparse"])
def test_a_run_that_stops_and_goes_on_within_a_stage_equals_one_that_does_not(go, tmp_path, stage):
    go("straight", stage, 3)
    go("parts", stage, 2)
    go("parts", stage, 3)
    clock = {"tokens_per_second", "mfu", "data_seconds"}
    for one, other in zip(*(read_metrics(tmp_path / name) for name in ("straight", "parts")), strict=True):
        assert all(one[name] == other[name] for name in one.keys() - clock - {"eval_loss", "eval_perplexity"})
    for one, other in zip(weights(tmp_path / "straight"), weights(tmp_path / "parts"), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())


def test_a_run_goes_from_warmup_to_sparse_with_its_data_schedule_and_moments(go, tmp_path):
    dense = ["--model.index-topk", "12"]  # so that the loss of a step tells the batch and the weights, not the stage
    go("warm", "dense-warmup", 6, *dense)
    go("x", "dense-warmup", 4, *dense)
    warm, held = weights(tmp_path / "x")
    said = go("x", "sparse", 5, *dense)
    assert "settings changed since the checkpoint: indexer.stage dense-warmup -> sparse; steps 4 -> 5" in said
    for names in ("step", "lr", "tokens", "loss", "mtp_1", "mtp_2"):
        one, other = ([row[names] for row in read_metrics(tmp_path / run)[:5]] for run in ("warm", "x"))
        assert one == other, names
    state = read_state(newest(tmp_path / "x" / "checkpoints")[0])[0]
    assert state == {"step": 5, "samples": 20, "tokens": 240, "skipped": 0}
    params, moments = weights(tmp_path / "x")
    updates = {path: float(moments[f"updates.{path}"]) for path in with_moments(moments)}
    old = indexers(params)
    assert updates == {path: 5.0 if path in old else 1.0 for path in params if "router_bias" not in path}
    rate, seen = read_metrics(tmp_path / "x")[4]["lr"], 0
    for path in updates:
        mean, square, step = moments[f"mean.{path}"], moments[f"square.{path}"], (params[path] - warm[path]).abs()
        if path in old:  # what there was, and a twentieth of a new square
            assert (square >= 0.95 * held[f"square.{path}"] * (1 - 1e-6)).all()
            assert not torch.equal(mean, held[f"mean.{path}"])
        else:  # zero before: then the mean is a tenth of the gradient and the square a twentieth of its square
            torch.testing.assert_close((mean / 0.1).square(), square / 0.05, rtol=1e-4, atol=0)
            decay = 0.1 * rate * warm[path].abs() * (warm[path].dim() > 1)
            large = mean.abs() > 1e-6  # beside which the optimizer's eps is nothing
            assert ((step - rate).abs() <= decay + 0.02 * rate)[large].all()
            seen += int(large.sum())
    assert seen > 1000


def test_the_moments_of_what_rests_are_dropped_and_start_anew(go, tmp_path):
    updates = []
    for stage, steps in (("sparse", 2), ("frozen", 3), ("sparse", 5), ("dense-warmup", 6)):
        before = weights(tmp_path / "x")[0] if updates else fresh()
        go("x", stage, steps)
        params, moments = weights(tmp_path / "x")
        assert bool(indexers(moved(params, before))) == (stage != "frozen")
        updates.append(tuple(moments.get(f"updates.{path}") for path in ("mtp.0.attn.indexer.q", "embed")))
    assert updates == [(2, 2), (None, 3), (2, 5), (3, None)]
    rows = numbers(tmp_path / "x")
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(b[4] - a[4] == 48 for a, b in pairwise(rows))


def test_moments_that_the_stage_of_a_checkpoint_should_have_left_are_missed_by_name(go, refuse, tmp_path):
    with pytest.MonkeyPatch.context() as real:
        real.setattr("train.train", run.train)
        go("x", "dense-warmup", 1)
    path = newest(tmp_path / "x" / "checkpoints")[0]
    file = path / "moments.safetensors"
    held = load_file(file)
    del held["square.layers.1.attn.indexer.weights"], held["updates.mtp.0.attn.indexer.k_norm"]
    save_file(held, file, {"format": "glm5fn"})
    counters, prints = read_state(path)
    write_state(path, counters, prints | {file.name: print_of(path, file.name)})
    for start, stage in (("auto", "sparse"), (path, "dense-warmup")):
        said = refuse(*FLAGS, "--out", tmp_path / "x", "--resume", start, "--indexer.stage", stage)
        assert f"--resume {start}: not of this model and optimizer: {path} does not hold what it must: " in said
        assert "missing: square.layers.1.attn.indexer.weights, updates.mtp.0.attn.indexer.k_norm" in said


def test_multi_token_prediction_that_is_not_trained_stays_as_it_is_and_has_no_moments(go, tmp_path):
    go("x", "sparse", 3, "--mtp.coef", "0")
    params, moments = weights(tmp_path / "x")
    mtp = {path for path in params if path.startswith("mtp.")}
    assert mtp and moved(params, fresh()) == params.keys() - mtp
    assert with_moments(moments) == {path for path in params.keys() - mtp if "router_bias" not in path}
    go("x", "sparse", 5)  # from here on it is trained
    assert moved(weights(tmp_path / "x")[0], params) >= mtp


def test_weight_sets_beyond_the_last_depth_stay_as_they_are(go, tmp_path):
    go("x", "sparse", 2, "--model.num-nextn-predict-layers", "3")
    params, moments = weights(tmp_path / "x")
    assert any(path.startswith("mtp.2.") for path in params)
    assert {path.split(".")[1] for path in with_moments(moments) if path.startswith("mtp.")} == {"0", "1"}


def test_a_warm_up_learns_from_tokens_without_labels_and_is_evaluated_on_the_attention_that_it_trains(tmp_path):
    tokens = torch.randint(0, 99, (4, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.full_like(tokens, -100)
    targets[3, 3] = 7
    save_file({"tokens": tokens, "targets": targets}, tmp_path / "a.safetensors")
    argv = [*FLAGS, *SCHEDULE, "--data.path", tmp_path / "a.safetensors", "--data.global-batch", "2"]
    stage = ["--indexer.stage", "dense-warmup", "--steps", "1"]
    assert train(*argv, *stage, "--out", tmp_path / "x") == 0  # its first two rows have no label
    record = read_metrics(tmp_path / "x")[0]
    assert record["skipped"] == 0 and record["loss"] is None and record["kl"] > 0
    assert moved(weights(tmp_path / "x")[0], fresh()) == indexers(fresh())
    run = parse([*FLAGS, "--indexer.stage", "dense-warmup"], RUNS).run
    assert run.evaluated.indexer.stage == "dense-warmup" and not run.evaluated.indexer.coef


def test_a_router_bias_that_is_not_finite_is_refused_before_the_first_step(tmp_path, capsys):
    cfg = parse(FLAGS, RUNS).run.model
    params = init_params(cfg)
    params["layers"]["1"]["ffn"]["router_bias"][2] = float("nan")
    save(tmp_path / "w", params, cfg)
    argv = [*FLAGS, *SCHEDULE, "--data.path", text(tmp_path), "--init", tmp_path / "w", "--out", tmp_path / "x"]
    assert train(*argv, "--steps", "2") == 1
    assert "layers.1.ffn.router_bias has numbers that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
