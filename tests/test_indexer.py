"""The indexers in a whole model: what they learn and leave alone, what a run again selects, what is never computed."""

from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch
from test_dsa_kernels import Watch
from tiny import FAMILIES, distance, random_batch, random_params, targets_ahead, tiny

from glm5fn import attn_dsa, flatten, forward, forward_mtp, loss, step, value_and_grad
from glm5fn.block import block
from glm5fn.comm import LOCAL, local
from glm5fn.dsa import make_index
from glm5fn.kernels import REFERENCE, TORCH, dsa_attention, dsa_loss, dsa_select
from glm5fn.losses import counts
from glm5fn.mla import absorb, project
from glm5fn.model import model_specs
from glm5fn.settings import PLAIN, IndexerConfig, MeshConfig, MTPConfig, RouterConfig, Terms
from glm5fn.spec import trained
from glm5fn.tree import unflatten

F64 = torch.float64
CFG = tiny(**FAMILIES["glm5"])  # layers 0, 1 and 3 of five have an indexer; one weight set predicts two depths
SCHEDULE = replace(CFG, num_hidden_layers=4, index_topk_freq=3, index_skip_topk_offset=1)  # full, shared, shared, full
SEGMENTS = torch.tensor([[1] * 7 + [2] * 9 + [3] + [0] * 3, [0] * 20, [1] * 20])
EACH_TOPK = pytest.mark.parametrize("topk", [4, 20], ids=["keys are dropped", "no keys are dropped"])
EACH_TEACHER = pytest.mark.parametrize("teacher", ["source", "served"])


def packed_batch(cfg, seed=1):
    """Packed documents, a row of padding, and a row that is one document."""
    batch = random_batch(cfg, 3, 20, seed)
    return batch | {"segments": SEGMENTS, "targets": batch["targets"].masked_fill(SEGMENTS == 0, -100)}


def terms_of(stage="sparse", coef=0.7, teacher="source", **mtp):
    return Terms(
        indexer=IndexerConfig(stage=stage, coef=coef, teacher=teacher),
        router=RouterConfig(balance_coef=0.1, z_coef=0.01),
        mtp=MTPConfig(coef=0.3, **mtp),
    )


def grads_of(params, cfg, terms, **how):
    function = partial(loss, batch=packed_batch(cfg), cfg=cfg, terms=terms, **how)
    (_, metrics), grads = value_and_grad(function)(params)
    return metrics, flatten(grads)


@EACH_TEACHER
@EACH_TOPK
def test_teaching_the_indexers_leaves_all_other_gradients_as_they_are_to_the_bit(topk, teacher):
    cfg = replace(CFG, index_topk=topk)
    params = random_params(cfg)
    assert {path.rpartition(".attn.indexer")[0] for path in flatten(params) if "indexer" in path} == {
        *("layers.0", "layers.1", "layers.3"),  # shared layers have no such weights
        "mtp.0",
    }
    on, off, frozen = (
        grads_of(params, cfg, terms)
        for terms in (terms_of(teacher=teacher), terms_of(coef=0.0, teacher=teacher), terms_of("frozen"))
    )
    assert "kl" in on[0] and "kl" not in off[0] and "kl" not in frozen[0]
    for path in flatten(params):
        assert all(torch.isfinite(grads[path]).all() for _, grads in (on, off, frozen)), path
        assert torch.equal(off[1][path], frozen[1][path]), path
        assert torch.equal(on[1][path], off[1][path]) != ("indexer" in path), path
        if "indexer" in path:
            assert on[1][path].any() and not off[1][path].any(), path


@EACH_TOPK
def test_in_the_dense_warm_up_the_indexers_learn_and_the_layers_attend_to_all_keys(topk):
    cfg = replace(CFG, index_topk=topk)
    params, everything = random_params(cfg, dtype=F64), replace(cfg, index_topk=20)
    warm, dense = grads_of(params, cfg, terms_of("dense-warmup")), grads_of(params, everything, terms_of())
    assert torch.equal(warm[0]["nll"], dense[0]["nll"])
    assert distance(unflatten(warm[1]), unflatten(dense[1])) < 1e-10
    assert all(warm[1][path].any() for path in trained(model_specs(cfg), "dense-warmup", 1))
    assert all("indexer" in path for path in trained(model_specs(cfg), "dense-warmup", 1))


@EACH_TOPK
@EACH_TEACHER
def test_each_indexer_of_a_model_learns_from_the_layers_that_it_is_to_learn_from(teacher, topk):
    """The sum over the indexers, each against the mean of its teachers, made by hand from the layers' inputs."""
    cfg = replace(SCHEDULE, index_topk=topk, num_nextn_predict_layers=0, num_mtp_depths=0)
    params, inputs = random_params(cfg, dtype=F64), []

    def watched(params, x, *args, **settings):
        inputs.append(REFERENCE.rms_norm(x, params["attn_norm"], cfg.rms_norm_eps).detach())
        return block(params, x, *args, **settings)

    metrics, grads = grads_of(params, cfg, terms_of(teacher=teacher), block=watched)
    positions = torch.tensor([[*range(7), *range(9), 0, *range(3)], [*range(20)], [*range(20)]])
    sizes = positions, cfg.rope_theta, cfg.latent_norm_eps, REFERENCE

    def by_hand(params):
        total = 0.0
        for source, served in ((0, (0, 1, 2)), (3, (3,))):
            teachers = []
            for i in served if teacher == "served" else (source,):
                attn = params["layers"][str(i)]["attn"]
                latents = project(attn, inputs[i], *sizes)
                teachers.append((absorb(attn, latents.q), latents.keys))
            attn = params["layers"][str(source)]["attn"]
            latents = project(attn, inputs[source], *sizes)
            latent, angles = latents.q_latent.detach(), latents.angles
            index = make_index(attn["indexer"], inputs[source], latent, angles, REFERENCE)
            chosen = REFERENCE.select(*index, SEGMENTS, topk) if topk < 20 else None
            total = total + REFERENCE.index_loss(teachers, *index, chosen, SEGMENTS, SEGMENTS != 0, 10**-0.5)
        return total, None

    (kl, _), wanted = value_and_grad(by_hand)(params)
    torch.testing.assert_close(metrics["kl"], kl, rtol=1e-10, atol=0)
    wanted = {path: leaf * 0.7 / 37 for path, leaf in flatten(wanted).items() if "indexer" in path}  # 37 real tokens
    assert distance(unflatten({path: grads[path] for path in wanted}), unflatten(wanted)) < 1e-10


def counting(name, function=None):
    """Kernels that count the calls of one, and the list that grows with each."""
    calls = []

    def called(*args):
        calls.append(name)
        return getattr(TORCH, name)(*args) if function is None else function(*args)

    return TORCH._replace(**{name: called}), calls


@pytest.mark.parametrize("stage", ["frozen", "dense-warmup", "sparse"])
@EACH_TEACHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_recomputing_two_batches_at_once_changes_no_bit_and_selects_once(dtype, teacher, stage):
    """Both forward passes come before both backward passes, so what a layer runs on again must be its own batch's."""
    cfg, results = SCHEDULE, []
    params, terms = random_params(cfg), terms_of(stage, teacher=teacher, share_indices=True)
    for recompute in (False, True):
        kernels, calls = counting("select")
        flat = {path: leaf.clone().requires_grad_() for path, leaf in flatten(params).items()}
        how = {"cfg": cfg, "terms": terms, "kernels": kernels, "recompute": recompute, "comm": local(dtype)}
        values = [loss(unflatten(flat), packed_batch(cfg, seed), **how) for seed in (1, 2)]
        full = cfg.indexers.count("full") + 1  # the second depth of MTP shares the keys of the first
        assert len(calls) == (0 if stage == "dense-warmup" else 2 * full)
        before = len(calls)
        for value, _ in values:
            value.backward()
        assert len(calls) == before
        grads = {path: leaf.grad for path, leaf in flat.items() if leaf.grad is not None}
        sums = {f"{i} {path}": leaf for i, (_, metrics) in enumerate(values) for path, leaf in flatten(metrics).items()}
        results.append(grads | sums)
    kept, again = results
    assert kept.keys() == again.keys() and all(torch.equal(leaf, again[path]) for path, leaf in kept.items())
    assert any("indexer" in path for path in kept) == (stage != "frozen")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("terms", [PLAIN, terms_of("frozen"), terms_of(coef=0.0), terms_of("dense-warmup", 0.0)])
def test_the_loss_of_the_indexers_is_computed_only_where_they_learn(terms, recompute):
    kernels, calls = counting("index_loss")
    grads_of(random_params(CFG), CFG, terms, kernels=kernels, recompute=recompute)
    assert not calls
    grads_of(random_params(CFG), CFG, terms_of(), kernels=kernels)
    assert len(calls) == 5  # three layers' and both depths'


def test_neither_evaluation_nor_a_forward_pass_computes_it(monkeypatch):
    kernels, calls = counting("index_loss", lambda *_: pytest.fail("the indexers' loss was computed"))
    params, batch = random_params(CFG), packed_batch(CFG)
    monkeypatch.setattr(step, "held_out_batches", lambda *_: [batch])
    run = type("Run", (), {"data": None, "model": CFG, "evaluated": PLAIN, "mesh": MeshConfig()})
    setup = step.Setup(
        run=run,
        device="cpu",
        data=None,
        load=lambda start: [batch],
        comm=LOCAL,
        specs=model_specs(CFG),
        trained=(),
        loss=partial(loss, cfg=CFG, kernels=kernels, terms=terms_of("dense-warmup"), recompute=True),
    )
    found = step.evaluate(setup, params)
    labels = (batch["targets"] != -100).sum()
    assert found["eval_loss"] == pytest.approx(float(loss(params, batch, CFG, terms=PLAIN)[1]["nll"] / labels))
    forward(params, batch["tokens"], CFG, segments=SEGMENTS, kernels=kernels)
    forward_mtp(params, batch["tokens"], CFG, segments=SEGMENTS, kernels=kernels)
    assert not calls


OPERATORS = {
    "select": dsa_select.select_in_chunks,
    "sparse_attention": dsa_attention.attend,
    "sparse_attention_back": dsa_attention.attend_back,
    "index_loss": dsa_loss.loss_and_grads,
}


class Inside(Watch):
    """Also watches what the operators of the kernels do inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "glm5fn":
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.add(func._opname)
        with self:
            return OPERATORS[func._opname](*args, **(kwargs or {}))


@pytest.mark.parametrize("taught", [False, True])
def test_sparse_attention_holds_no_pairs_of_all_queries_and_keys(taught, monkeypatch):
    monkeypatch.setitem(dsa_select.HELD, "cpu", 1 << 12)
    params, x = random_params(CFG)["layers"]["0"]["attn"], torch.randn(1, 512, 22)

    def value(params):
        y, _, kl = attn_dsa(params, x, topk=4, taught=taught)
        return y.square().sum() + (kl or 0.0), None

    with Inside() as watch:
        watch.seen = set()
        value_and_grad(value)(params)
    assert watch.seen == {*OPERATORS} - (set() if taught else {"index_loss"})
    assert watch.most <= 512 * 512 // 8


def test_each_part_of_the_loss_is_divided_by_what_it_counts_in_the_value_and_in_the_record():
    params, batch = random_params(CFG), packed_batch(CFG)
    batch["targets"][1] = -100  # so that there are far fewer labels than real tokens
    value, metrics = loss(params, batch, CFG, terms=terms_of())
    labels, real = int((batch["targets"] != -100).sum()), int((SEGMENTS != 0).sum())
    runs = [[number for number, _ in groupby(row) if number] for row in SEGMENTS.tolist()]
    per = {"nll": labels, "kl": real, "z": real, "balance": sum(map(len, runs))}
    per |= {f"mtp_{d}": int((targets_ahead(batch, d) != -100).sum()) for d in range(1, CFG.mtp_depths + 1)}
    assert len({labels, real, per["balance"], per["mtp_1"]}) == 4
    coefs = {"nll": 1.0, "kl": 0.7, "balance": 0.1, "z": 0.01}
    coefs |= dict.fromkeys((f"mtp_{d}" for d in range(1, CFG.mtp_depths + 1)), 0.3 / CFG.mtp_depths)
    means = {name: float(metrics[name]) / number for name, number in per.items()}
    assert float(value) == pytest.approx(sum(coefs[name] * mean for name, mean in means.items()), rel=1e-6)
    record = step.averages(metrics, {k: int(v) for k, v in counts(batch, CFG).items()})
    assert record["loss"] == pytest.approx(means.pop("nll"))
    assert {name: record[name] for name in means} == pytest.approx(means)
