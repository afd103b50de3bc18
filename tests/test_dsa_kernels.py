"""Selection, sparse attention and the indexer's loss: slow ones against loops, chunked ones against slow ones."""

import math

import pytest
import torch
from tiny import distance

from glm5fn.kernels import REFERENCE, TORCH, WIDENED, dsa_attention, dsa_loss, dsa_select

F64 = torch.float64
ROWS, STEPS, INDEX_HEADS, INDEX_DIM, HEADS, DIM, RANK = 2, 37, 3, 6, 5, 10, 7
SCALE = 0.3
KERNELS = pytest.mark.parametrize("kernels", [REFERENCE, TORCH, WIDENED], ids=["reference", "torch", "widened"])
DOCUMENTS = torch.tensor([[1] * 9 + [2] * 20 + [3] + [4] * 7, [0] * 5 + [3] * 30 + [0] * 2])
EACH_SEGMENTS = pytest.mark.parametrize("segments", [None, DOCUMENTS], ids=["whole rows", "documents"])
EACH_BUDGET = pytest.mark.parametrize("budget", [1, 300, 1 << 22], ids=lambda n: f"{n} numbers at once")


def randn(*size, seed, dtype=F64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def index(dtype=F64):
    """Index queries, keys and head weights; every third query has weights of 0, so that all its scores are equal."""
    weights = randn(ROWS, STEPS, INDEX_HEADS, seed=3, dtype=dtype)
    weights[:, ::3] = 0
    q, k = (
        randn(ROWS, STEPS, INDEX_HEADS, INDEX_DIM, seed=1, dtype=dtype),
        randn(ROWS, STEPS, INDEX_DIM, seed=2, dtype=dtype),
    )
    return q, k, weights


def attention(seed=4, dtype=F64):
    return randn(ROWS, STEPS, HEADS, DIM, seed=seed, dtype=dtype), randn(ROWS, STEPS, DIM, seed=seed + 1, dtype=dtype)


def keys_of(query, row, segments):
    return [t for t in range(query + 1) if segments is None or segments[row, t] == segments[row, query]]


@pytest.fixture
def chunked(monkeypatch):
    def chunked(budget):
        monkeypatch.setitem(dsa_select.HELD, "cpu", budget)

    return chunked


@KERNELS
@EACH_SEGMENTS
@EACH_BUDGET
@pytest.mark.parametrize("topk", [1, 4, 16, 40])
def test_each_query_selects_the_best_allowed_keys_and_at_ties_the_lower(kernels, segments, budget, topk, chunked):
    chunked(budget)
    q, k, weights = index()
    chosen = kernels.select(q, k, weights, segments, topk)
    for b in range(ROWS):
        for s in range(STEPS):
            scores = {}
            for t in keys_of(s, b, segments):
                heads = [float(weights[b, s, i]) * max(0.0, float(q[b, s, i] @ k[b, t])) for i in range(INDEX_HEADS)]
                scores[t] = sum(heads) / math.sqrt(INDEX_HEADS) / math.sqrt(INDEX_DIM)
            best = sorted(scores, key=lambda t: (-scores[t], t))[:topk]
            assert chosen[b, s].tolist() == sorted(best) + [-1] * (chosen.shape[-1] - len(best))


@pytest.mark.parametrize("kernels", [REFERENCE, TORCH], ids=["reference", "torch"])
def test_zeros_of_either_sign_tie(kernels):
    q, k = torch.ones(1, 8, 1, 2), torch.full((1, 8, 2), -1.0)  # no head is active: relu gives 0 throughout
    for sign in (1.0, -1.0):
        weights = torch.full((1, 8, 1), sign)
        weights[0, ::2] *= -1
        chosen = kernels.select(q, k, weights, None, 3)
        assert chosen[0, 2:].tolist() == [[0, 1, 2]] * 6 and chosen[0, 0].tolist() == [0, -1, -1]


@KERNELS
def test_scores_of_bf16_inputs_are_made_in_fp32(kernels):
    q, k, weights = index(torch.bfloat16)
    wide = REFERENCE.select(q.float(), k.float(), weights.float(), None, 4)
    assert torch.equal(kernels.select(q, k, weights, None, 4), wide)


@KERNELS
@EACH_SEGMENTS
def test_sparse_attention_equals_a_loop_over_the_selected_latents(kernels, segments):
    (q, keys), chosen = attention(), REFERENCE.select(*index(), segments, 4)
    y = kernels.sparse_attention(q, keys, chosen, RANK, SCALE)
    for b in range(ROWS):
        for s in range(STEPS):
            selected = [t for t in chosen[b, s].tolist() if t >= 0]
            for h in range(HEADS):
                weights = [math.exp(SCALE * float(q[b, s, h] @ keys[b, t])) for t in selected]
                mean = sum(w * keys[b, t, :RANK] for w, t in zip(weights, selected, strict=True)) / sum(weights)
                torch.testing.assert_close(y[b, s, h], mean, rtol=1e-10, atol=1e-12)


def results(function, *inputs):
    """What a function gives, and its gradients in a direction that tells all elements apart."""
    inputs = [leaf.clone().requires_grad_() for leaf in inputs]
    y = function(*inputs)
    grads = torch.autograd.grad(y, inputs, randn(*y.shape, seed=9, dtype=y.dtype))
    return {str(i): leaf for i, leaf in enumerate((y, *grads))}


@EACH_SEGMENTS
@EACH_BUDGET
def test_chunked_sparse_attention_has_the_gradients_of_the_whole_one(segments, budget, chunked):
    chunked(budget)
    chosen = REFERENCE.select(*index(), segments, 4)
    one, other = (
        results(lambda q, keys, kernels=kernels: kernels.sparse_attention(q, keys, chosen, RANK, SCALE), *attention())
        for kernels in (REFERENCE, TORCH)
    )
    assert distance(one, other) < 1e-10


@pytest.mark.parametrize("selection", ["selected keys", "all keys"])
@pytest.mark.parametrize("real", [None, randn(ROWS, STEPS, seed=7) < 0.6], ids=["no padding", "padding"])
@EACH_SEGMENTS
def test_the_indexer_loss_equals_a_loop(segments, real, selection):
    teachers = [attention(), attention(seed=20)]
    q, k, weights = index()
    chosen = REFERENCE.select(q, k, weights, segments, 4) if selection == "selected keys" else None
    total = 0.0
    for b in range(ROWS):
        for s in range(STEPS):
            if real is not None and not real[b, s]:
                continue
            keys = keys_of(s, b, segments) if chosen is None else [t for t in chosen[b, s].tolist() if t >= 0]
            target = torch.zeros(len(keys), dtype=F64)
            for query, latents in teachers:
                for h in range(HEADS):
                    raw = torch.tensor([SCALE * float(query[b, s, h] @ latents[b, t]) for t in keys], dtype=F64)
                    target += raw.softmax(0) / HEADS / len(teachers)
            heads = [torch.relu(k[b, keys] @ q[b, s, i]) * weights[b, s, i] for i in range(INDEX_HEADS)]
            logs = (sum(heads) / math.sqrt(INDEX_HEADS * INDEX_DIM)).log_softmax(0)
            total += float((target * (target.log() - logs)).sum())
    for kernels in (REFERENCE, TORCH, WIDENED):
        loss = kernels.index_loss(teachers, q, k, weights, chosen, segments, real, SCALE)
        assert math.isclose(loss, total, rel_tol=1e-10)


@pytest.mark.parametrize("selection", ["selected keys", "all keys"])
@pytest.mark.parametrize("real", [None, randn(ROWS, STEPS, seed=7) < 0.6], ids=["no padding", "padding"])
@EACH_BUDGET
@EACH_SEGMENTS
def test_the_chunked_indexer_loss_has_the_gradients_of_the_whole_one(segments, budget, real, selection, chunked):
    chunked(budget)
    teachers = [attention(), attention(seed=20)]
    chosen = REFERENCE.select(*index(), segments, 4) if selection == "selected keys" else None
    one, other = (
        results(
            lambda q, k, w, kernels=kernels: kernels.index_loss(teachers, q, k, w, chosen, segments, real, SCALE),
            *index(),
        )
        for kernels in (REFERENCE, TORCH)
    )
    assert distance(one, other) < 1e-10


def test_teachers_learn_nothing_and_one_allowed_key_costs_nothing():
    (q, keys), inputs = attention(), [leaf.requires_grad_() for leaf in index()]
    q.requires_grad_(), keys.requires_grad_()
    segments = torch.arange(STEPS).expand(ROWS, -1)  # each token is a document
    for chosen in (None, REFERENCE.select(*index(), segments, 4)):
        loss = TORCH.index_loss([(q, keys)], *inputs, chosen, segments, None, SCALE)
        loss.backward()
        assert loss == 0 and q.grad is None and keys.grad is None
        assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in inputs)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the largest number of elements that an operation inside gave."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            self.most = max(self.most, leaf.numel() if isinstance(leaf, torch.Tensor) else 0)
        return out


def test_no_kernel_holds_all_pairs_of_queries_and_keys(chunked):
    chunked(1 << 12)
    steps, heads, dim, topk = 512, 2, 4, 8
    q, keys = randn(1, steps, heads, dim, seed=1), randn(1, steps, dim, seed=2)
    index_q, index_k, weights = (
        randn(1, steps, heads, dim, seed=3),
        randn(1, steps, dim, seed=4),
        randn(1, steps, heads, seed=5),
    )
    with Watch() as watch:
        chosen = dsa_select.select_in_chunks(index_q, index_k, weights, None, topk)
        slope = dsa_attention.attend(q, keys, chosen, 3, SCALE)
        dsa_attention.attend_back(slope, q, keys, chosen, SCALE)
        for support in (chosen, None):
            dsa_loss.loss_and_grads([q], [keys], index_q, index_k, weights, support, None, None, SCALE)
    assert watch.most <= steps * steps // 16


@KERNELS
@EACH_SEGMENTS
@EACH_BUDGET
@pytest.mark.parametrize("last", [1, 5, 36])
def test_the_queries_of_the_last_places_alone_are_computed_as_among_all(kernels, segments, budget, last, chunked):
    chunked(budget)
    (index_q, index_k, weights), (q, keys), cut = index(), attention(), slice(STEPS - last, None)
    chosen = kernels.select(index_q, index_k, weights, segments, 4)
    own = kernels.select(index_q[:, cut], index_k, weights[:, cut], segments, 4)
    assert torch.equal(own, chosen[:, cut])
    q, keys, index_k = (x.clone().requires_grad_() for x in (q, keys, index_k))
    k, v = keys[:, None], keys[:, None, :, :RANK]
    real = None if segments is None else segments != 0

    def results(part, chosen):
        some = None if real is None else real[:, part]
        teachers = [(q[:, part], keys)]
        index = index_q[:, part], index_k, weights[:, part]
        yield kernels.attention(q[:, part].transpose(1, 2), k, v, segments).transpose(1, 2)
        yield kernels.sparse_attention(q[:, part], keys, chosen, RANK, SCALE)
        for selected in (chosen, None):
            yield kernels.index_loss(teachers, *index, selected, segments, some, SCALE)

    ours = list(results(cut, own))
    for number, (a, b) in enumerate(zip(ours, results(slice(None), chosen), strict=True)):
        if a.dim():
            slope = randn(*a.shape, seed=9)
            both = (a * slope).sum(), (b[:, cut] * slope).sum()
            assert distance({"x": a}, {"x": b[:, cut]}) < 1e-10, number
        else:
            unreal = torch.ones(ROWS, STEPS, dtype=torch.bool) if real is None else real.clone()
            unreal[:, : STEPS - last] = False
            selected = chosen if number == 2 else None
            whole = kernels.index_loss([(q, keys)], index_q, index_k, weights, selected, segments, unreal, SCALE)
            both = a, whole
            assert torch.allclose(a, whole, rtol=1e-10), number
        wrt = [keys] if a.dim() else [index_k]
        grads = [torch.autograd.grad(value, wrt, retain_graph=True)[0] for value in both]
        assert distance({"x": grads[0]}, {"x": grads[1]}) < 1e-10, number
