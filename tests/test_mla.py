"""Latent attention and its sparse form as blocks: against slow loops, against each other, and what learns from what."""

import cmath
import math

import pytest
import torch
from tiny import SPARSE, distance, random_params, tiny

from glm5fn import attn_dsa, attn_mla, flatten
from glm5fn.dsa import Selected, make_index
from glm5fn.grad import value_and_grad
from glm5fn.kernels import REFERENCE, TORCH
from glm5fn.kernels.reference import index_scores
from glm5fn.mla import project
from glm5fn.tree import unflatten

F64 = torch.float64
CFG = tiny(**SPARSE)  # q_rank 10, kv_rank 14, nope 6, rope 4, v 5; 3 heads; indexer 2 x 9
STEPS, THETA, EPS = 17, 50.0, 1e-3
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 9 + [0] * 3, [4] * 17])
EACH_SEGMENTS = pytest.mark.parametrize("segments", [None, DOCUMENTS], ids=["whole rows", "documents"])
SIZES = {"theta": THETA, "eps": EPS}


@pytest.fixture
def params():
    return random_params(CFG, dtype=F64)["layers"]["0"]["attn"]


def states(seed=3, rows=2):
    return torch.randn(rows, STEPS, 22, generator=torch.Generator().manual_seed(seed), dtype=F64)


def norm(x, weight):
    return x / torch.sqrt((x * x).mean() + EPS) * weight


def turn(x, position):
    """RoPE on adjacent pairs."""
    pairs = [complex(a, b) for a, b in x.view(-1, 2)]
    turned = [z * cmath.exp(1j * position / THETA ** (2 * r / len(x))) for r, z in enumerate(pairs)]
    return torch.tensor([part for z in turned for part in (z.real, z.imag)], dtype=F64)


def loop(params, x, allowed):
    """The paper's equations, one query, head and key at a time. allowed(row, query): the keys that it meets."""
    rank, nope = 14, 6
    y = torch.zeros(*x.shape[:2], 3, 5, dtype=F64)
    for b in range(x.shape[0]):
        kv = [params["kv_a"] @ x[b, t] for t in range(STEPS)]
        latents = [norm(part[:rank], params["kv_a_norm"]) for part in kv]
        ropes = [turn(part[rank:], t) for t, part in enumerate(kv)]
        for s in range(STEPS):
            q_latent, keys = norm(params["q_a"] @ x[b, s], params["q_a_norm"]), allowed(b, s)
            for h in range(3):
                q, rows = params["q_b"][h] @ q_latent, params["kv_b"][h]
                content, place = q[:nope], turn(q[nope:], s)
                raw = [float(content @ (rows[:nope] @ latents[t]) + place @ ropes[t]) / math.sqrt(10) for t in keys]
                weights = torch.tensor(raw, dtype=F64).softmax(0)
                y[b, s, h] = sum(w * (rows[nope:] @ latents[t]) for w, t in zip(weights, keys, strict=True))
    return torch.einsum("bshu,dhu->bsd", y, params["o"])


def causal(segments):
    return lambda b, s: [t for t in range(s + 1) if segments is None or segments[b, t] == segments[b, s]]


def index_loop(params, x, b, s, keys):
    """The index scores of one query (DeepSeek-V3.2, eq. 1)."""
    indexer, q_latent = params["indexer"], norm(params["q_a"] @ x[b, s], params["q_a_norm"])
    scores = []
    for t in keys:
        k = indexer["k"] @ x[b, t]
        k = (k - k.mean()) / torch.sqrt(k.var(correction=0) + 1e-6) * indexer["k_norm"] + indexer["k_norm_bias"]
        k = torch.cat((turn(k[:4], t), k[4:]))
        score = 0.0
        for i in range(2):
            q = indexer["q"][i] @ q_latent
            q = torch.cat((turn(q[:4], s), q[4:]))
            weight = float(indexer["weights"][i] @ x[b, s])
            score += weight / math.sqrt(2) * max(0.0, float(q @ k) / math.sqrt(9))
        scores.append(score)
    return scores


def selection(params, x, segments, topk):
    """For each row and query the keys that it selects, by sorting."""

    def chosen(b, s):
        keys = causal(segments)(b, s)
        scores = dict(zip(keys, index_loop(params, x, b, s, keys), strict=True))
        return sorted(sorted(keys, key=lambda t: (-scores[t], t))[:topk])

    return chosen


@EACH_SEGMENTS
@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
def test_latent_attention_equals_the_equations(params, segments, absorbed):
    x = states()
    y = attn_mla(params, x, None, segments, absorbed=absorbed, **SIZES)
    torch.testing.assert_close(y, loop(params, x, causal(segments)), rtol=1e-10, atol=1e-12)


def test_the_expanded_and_the_absorbed_form_have_equal_gradients(params):
    def function(params, absorbed):
        y = attn_mla(params, states(), None, DOCUMENTS, absorbed=absorbed, **SIZES)
        return (y * states(seed=5)).sum(), None

    one, other = (value_and_grad(function)(params, absorbed)[1] for absorbed in (False, True))
    assert distance(one, other) < 1e-10 and any(leaf.any() for leaf in flatten(one).values())


def test_the_index_scores_equal_the_equations(params):
    x = states() * 0.02  # so small that the norms' eps count
    params = params | {"q_a_norm": torch.linspace(0.2, 3.0, 10, dtype=F64)}
    latents = project(params, x, None, THETA, EPS, TORCH)
    scores = index_scores(*make_index(params["indexer"], x, latents.q_latent, latents.angles, TORCH))
    for b in range(2):
        for s in range(STEPS):
            wanted = torch.tensor(index_loop(params, x, b, s, range(s + 1)), dtype=F64)
            torch.testing.assert_close(scores[b, s, : s + 1], wanted, rtol=1e-10, atol=1e-12)


@EACH_SEGMENTS
@pytest.mark.parametrize("kernels", [REFERENCE, TORCH], ids=["reference", "torch"])
@pytest.mark.parametrize("topk", [1, 4, 6])
def test_sparse_attention_selects_by_the_index_scores_and_attends_to_those_alone(params, segments, kernels, topk):
    x, chosen = states(), {}
    y, selected, kl = attn_dsa(params, x, None, segments, topk=topk, kernels=kernels, **SIZES)
    wanted = selection(params, x, segments, topk)
    for b in range(2):
        for s in range(STEPS):
            chosen[b, s] = [t for t in selected.chosen[b, s].tolist() if t >= 0]
            assert chosen[b, s] == wanted(b, s)
    torch.testing.assert_close(y, loop(params, x, lambda b, s: chosen[b, s]), rtol=1e-10, atol=1e-12)
    assert kl is None


@EACH_SEGMENTS
@pytest.mark.parametrize("dense", [False, True], ids=["short enough", "dense on request"])
def test_where_all_keys_may_be_selected_sparse_attention_is_the_dense_one(params, segments, dense):
    y, selected, _ = attn_dsa(params, states(), None, segments, topk=4 if dense else STEPS, dense=dense, **SIZES)
    assert selected == Selected(None) and torch.equal(y, attn_mla(params, states(), None, segments, **SIZES))


def test_sparse_attention_with_a_slot_for_each_key_equals_the_dense_one(params):
    x = states()
    latents = project(params, x, None, THETA, EPS, TORCH)
    index = make_index(params["indexer"], x, latents.q_latent, latents.angles, TORCH)
    everything = Selected(TORCH.select(*index, None, STEPS))
    y, _, _ = attn_dsa({k: v for k, v in params.items() if k != "indexer"}, x, selected=everything, topk=4, **SIZES)
    torch.testing.assert_close(y, attn_mla(params, x, **SIZES), rtol=1e-10, atol=1e-12)


def test_equal_scores_select_the_lowest_positions(params):
    silent = params | {"indexer": params["indexer"] | {"weights": torch.zeros(2, 22, dtype=F64)}}
    for kernels in (REFERENCE, TORCH):
        chosen = attn_dsa(silent, states(), topk=4, kernels=kernels, **SIZES).selected.chosen
        assert chosen[:, 4:].tolist() == [[[0, 1, 2, 3]] * (STEPS - 4)] * 2


def test_a_layer_without_an_indexer_takes_the_keys_of_the_layer_before(params):
    shared = {name: leaf for name, leaf in params.items() if name != "indexer"}
    selected = attn_dsa(params, states(), topk=4, **SIZES).selected
    y, passed, _ = attn_dsa(shared, states(seed=8), selected=selected, topk=4, **SIZES)
    assert passed is selected
    wanted = loop(params, states(seed=8), lambda b, s: [t for t in selected.chosen[b, s].tolist() if t >= 0])
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="no indexer of its own"):
        attn_dsa(shared, states(), topk=4, **SIZES)


@pytest.mark.parametrize("topk", [4, STEPS], ids=["sparse", "dense"])
def test_a_query_has_no_gradient_at_later_keys_and_one_at_its_own(params, topk):
    x = states(rows=1).requires_grad_()
    for s in range(STEPS):
        (slope,) = torch.autograd.grad(attn_dsa(params, x, topk=topk, **SIZES).y[:, s].sum(), x)
        assert not slope[:, s + 1 :].any() and slope[:, s].any()
        assert s >= topk or slope[:, : s + 1].any(-1).all()  # a query with fewer keys than slots meets them all


def taught(params, x, topk=4, **settings):
    y, _, kl = attn_dsa(params, x, None, DOCUMENTS, topk=topk, taught=True, real=DOCUMENTS != 0, **SIZES, **settings)
    return y, kl


def kl_loop(params, x, chosen):
    """The loss of the indexer by its definition; differentiable by its own parameters."""
    total = 0.0
    for b in range(2):
        for s in range(STEPS):
            if not DOCUMENTS[b, s]:
                continue
            keys = chosen(b, s)
            latents = project(params, x, None, THETA, EPS, REFERENCE)
            kv = torch.einsum("tc,hnc->htn", latents.keys[b, keys][:, :14], params["kv_b"][:, :6])
            raw = (
                torch.einsum("hn,htn->ht", latents.q[b, s, :, :6], kv)
                + latents.q[b, s, :, 6:] @ latents.keys[b, keys][:, 14:].T
            )
            target = (raw / math.sqrt(10)).softmax(-1).mean(0).detach()
            index = make_index(params["indexer"], x.detach(), latents.q_latent.detach(), latents.angles, REFERENCE)
            active = torch.relu(index.q[b, s] @ index.k[b, keys].T) * index.weights[b, s][:, None]
            total = total + (target * (target.log() - (active.sum(0) / math.sqrt(18)).log_softmax(0))).sum()
    return total


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_the_indexer_learns_from_the_attention_and_nothing_else_does(params, stage):
    x = states()
    chosen = causal(DOCUMENTS) if stage == "dense" else selection(params, x, DOCUMENTS, 4)
    wanted, expected = value_and_grad(lambda params: (kl_loop(params, x, chosen), None))(params)
    found, grads = value_and_grad(lambda params: (taught(params, x, dense=stage == "dense")[1], None))(params)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=0)
    assert distance(grads["indexer"], expected["indexer"]) < 1e-10
    for path, leaf in flatten(grads).items():
        assert leaf.any() == path.startswith("indexer."), path


@pytest.mark.parametrize("topk", [4, STEPS], ids=["sparse", "dense"])
def test_teaching_the_indexer_leaves_the_other_gradients_as_they_are_to_the_bit(params, topk):
    x, slope = states().requires_grad_(), states(seed=6)

    def grads(weight):
        def function(tree):
            tree = unflatten(flatten(tree))
            y, kl = taught(tree["attn"], tree["x"], topk)
            return (y * slope).sum() + weight * kl, None

        return flatten(value_and_grad(function)({"attn": params, "x": x.detach()})[1])

    one, other = grads(0.0), grads(0.7)
    for path, leaf in one.items():
        assert torch.equal(leaf, other[path]) != ("indexer" in path), path
        assert "indexer" not in path or not leaf.any()


def test_an_indexer_that_serves_several_layers_learns_from_their_mean(params):
    """IndexCache, arXiv 2603.12201."""
    shared = {
        name: leaf
        for name, leaf in random_params(CFG, seed=5, dtype=F64)["layers"]["1"]["attn"].items()
        if name != "indexer"
    }
    x, later = states(), states(seed=11)
    settings = {"topk": 4, "taught": True, "real": DOCUMENTS != 0, **SIZES}

    def both(tree):
        first = attn_dsa(tree, x, None, DOCUMENTS, ends=False, **settings)
        assert first.kl is None
        last = attn_dsa(shared, later, None, DOCUMENTS, first.selected, **settings)
        assert last.selected == Selected(first.selected.chosen)
        return last.kl, None

    def teacher(params, x):
        latents = project(params, x, None, THETA, EPS, REFERENCE)
        return torch.cat(
            (torch.einsum("bshk,hkc->bshc", latents.q[..., :6], params["kv_b"][:, :6]), latents.q[..., 6:]), -1
        ), latents.keys

    def slow(tree):
        latents = project(tree, x, None, THETA, EPS, REFERENCE)
        index = make_index(tree["indexer"], x, latents.q_latent.detach(), latents.angles, REFERENCE)
        chosen = REFERENCE.select(*index, DOCUMENTS, 4)
        teachers = [teacher(params, x), teacher(shared, later)]
        return REFERENCE.index_loss(teachers, *index, chosen, DOCUMENTS, DOCUMENTS != 0, 10**-0.5), None

    (one, _), grads = value_and_grad(both)(params)
    (other, _), expected = value_and_grad(slow)(params)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    assert distance(grads["indexer"], expected["indexer"]) < 1e-10
    assert not any(leaf.any() for path, leaf in flatten(grads).items() if not path.startswith("indexer."))
