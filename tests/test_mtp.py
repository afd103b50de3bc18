"""Multi-token prediction: its wiring against a loop of its own, its targets, and what its loss teaches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES, distance, random_batch, random_params, targets_ahead, tiny
from transformers import Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from glm5fn import flatten, forward_mtp, loss, value_and_grad
from glm5fn.block import block
from glm5fn.kernels import TORCH
from glm5fn.losses import counts
from glm5fn.save import save_hf
from glm5fn.settings import PLAIN, IndexerConfig, MTPConfig, Terms
from glm5fn.tree import tree_map

F64 = torch.float64
GLM5 = tiny(**FAMILIES["glm5"])  # one weight set predicts two depths
GQA = tiny(**FAMILIES["glm4_moe, experts"])
SEGMENTS = torch.tensor([[1] * 7 + [2] * 9 + [3] + [0] * 3])
MODELS = {
    "two depths by one set": GLM5,
    "two depths by two sets": replace(GLM5, num_nextn_predict_layers=2),
    "no keys are dropped": replace(GLM5, index_topk=20),
    "three depths by one set": replace(GLM5, num_mtp_depths=3),
    "grouped queries": GQA,
}
EACH_MODEL = pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)


def slow_logits(params, tokens, cfg):
    """Main and further logits of one row: SPEC's section on MTP written down, layer by layer."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + cfg.rms_norm_eps).sqrt() * weight

    steps = tokens.shape[1]
    h, selected = params["embed"][tokens], None
    for i in range(cfg.num_hidden_layers):
        h, selected, _ = block(params["layers"][str(i)], h, selected=selected, cfg=cfg)
    h = norm(h, params["norm"])
    logits = [h @ params["head"].T]
    for d in range(1, cfg.mtp_depths + 1):
        sets = params["mtp"]
        weights = sets[str(d - 1)] if len(sets) > 1 else sets["0"]
        joined = []
        for t in range(steps - d):  # behind the end there is no token
            embedded = norm(params["embed"][tokens[:, t + d]], weights["embed_norm"])
            joined.append(torch.cat((embedded, norm(h[:, t], weights["hidden_norm"])), -1) @ weights["join"].T)
        h = norm(block(weights, torch.stack(joined, 1), cfg=cfg).x, weights["norm"])
        logits.append(h @ params["head"].T)
    return logits


@EACH_MODEL
def test_the_logits_of_each_depth_equal_a_loop(cfg):
    params, tokens = random_params(cfg, dtype=F64), random_batch(cfg, steps=13)["tokens"]
    main, further = forward_mtp(params, tokens, cfg)
    wanted = slow_logits(params, tokens, cfg)
    assert len(further) == cfg.mtp_depths == len(wanted) - 1
    torch.testing.assert_close(main, wanted[0], rtol=1e-10, atol=1e-10)
    for d, (one, other) in enumerate(zip(further, wanted[1:], strict=True), 1):
        torch.testing.assert_close(one[:, : 13 - d], other, rtol=1e-10, atol=1e-10)


@EACH_MODEL
def test_packed_documents_give_the_logits_of_separate_ones(cfg):
    params, tokens = random_params(cfg, dtype=F64), random_batch(cfg, 1, 20)["tokens"]
    packed = forward_mtp(params, tokens, cfg, segments=SEGMENTS)
    for low, high in ((0, 7), (7, 16)):
        alone = forward_mtp(params, tokens[:, low:high], cfg)
        torch.testing.assert_close(packed[0][:, low:high], alone[0], rtol=1e-10, atol=1e-10)
        for d, (one, other) in enumerate(zip(packed[1], alone[1], strict=True), 1):
            ends = high - low - d
            torch.testing.assert_close(one[:, low : high - d], other[:, :ends], rtol=1e-10, atol=1e-10)


def test_the_logits_equal_those_of_transformers_that_reads_our_export(tmp_path, monkeypatch):
    """Of glm4_moe. For glm_moe_dsa `MtpModel` cannot serve: its config has no `num_mtp_layers`, and its layers give a
    pair, which `MtpLayer` norms as if it were the states."""
    params, tokens = random_params(GQA), random_batch(GQA, steps=13)["tokens"]
    save_hf(tmp_path / "hf", params, GQA)
    theirs = [r"model\.layers\.2\..*"]  # it knows the layers of MTP by their number in the released models
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", theirs)
    oracle = Glm4MoeForCausalLM.from_pretrained(tmp_path / "hf", experts_implementation="eager").eval()
    drafts = MtpModel.from_pretrained(oracle)
    main, (further,) = forward_mtp(params, tokens, GQA)
    with torch.no_grad():
        h = oracle.model(tokens).last_hidden_state[:, :-1]
        wanted = oracle.lm_head(drafts.forward_layer(0, h, torch.arange(1, 13)[None], None, input_ids=tokens[:, 1:]))
        assert (main - oracle(tokens).logits).abs().max() <= 1e-5 * main.abs().max()
        assert (further[:, :-1] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_each_position_must_predict_the_token_beyond_the_next_one_of_its_own_document():
    tokens, none = torch.arange(100, 120)[None], -100
    ends = (F.pad(SEGMENTS[:, 1:], (0, 1)) != SEGMENTS) | (SEGMENTS == 0)
    batch = {"tokens": tokens, "targets": (tokens + 1).masked_fill(ends, none), "segments": SEGMENTS}
    assert targets_ahead(batch, 1)[0].tolist() == [
        *(102, 103, 104, 105, 106, none, none),
        *(109, 110, 111, 112, 113, 114, 115, none, none),
        *(none, none, none, none),
    ]
    assert targets_ahead(batch, 2)[0].tolist() == [
        *(103, 104, 105, 106, none, none, none),
        *(110, 111, 112, 113, 114, 115, none, none, none),
        *(none, none, none, none),
    ]
    assert (targets_ahead(batch, 9) == none).all() and (targets_ahead(batch, 25) == none).all()
    assert {name: int(n) for name, n in counts(batch, GLM5).items()} == {
        "labels": 14,
        "real": 17,
        "documents": 3,
        "mtp_1": 12,
        "mtp_2": 10,
    }


def test_a_masked_label_is_masked_at_every_depth_and_a_row_without_documents_is_one():
    tokens = torch.arange(10, 16)[None]
    batch = {"tokens": tokens, "targets": torch.tensor([[11, 12, -100, 14, 15, -100]])}
    assert targets_ahead(batch, 1).tolist() == [[12, -100, 14, 15, -100, -100]]
    assert targets_ahead(batch, 2).tolist() == [[-100, 14, 15, -100, -100, -100]]


def packed_batch(cfg):
    batch = random_batch(cfg, 2, 20)
    segments = torch.cat((SEGMENTS, torch.ones_like(SEGMENTS)))
    return batch | {"segments": segments, "targets": batch["targets"].masked_fill(segments == 0, -100)}


def grads_of(params, batch, cfg, **mtp):
    terms = replace(PLAIN, mtp=MTPConfig(**mtp))
    (value, metrics), grads = value_and_grad(partial(loss, batch=batch, cfg=cfg, terms=terms))(params)
    return value, metrics, grads


def test_both_losses_add_up_in_value_and_on_embedding_and_head():
    params, batch = random_params(GLM5, dtype=F64), packed_batch(GLM5)
    plain, _, alone = grads_of(params, batch, GLM5, coef=0.0)
    value, metrics, both = grads_of(params, batch, GLM5, coef=0.3)

    def further(params):
        means = []
        for d, logits in enumerate(forward_mtp(params, batch["tokens"], GLM5, segments=batch["segments"])[1], 1):
            means.append(F.cross_entropy(logits.flatten(0, 1), targets_ahead(batch, d).flatten()))
        return 0.3 * torch.stack(means).mean(), torch.stack(means)

    (extra, means), grads = value_and_grad(further)(params)
    torch.testing.assert_close(value, plain + extra, rtol=1e-10, atol=0)
    assert distance(both, tree_map(torch.add, alone, grads)) < 1e-10
    for name in ("embed", "head"):
        assert alone[name].any() and grads[name].any()
    for d, mean in enumerate(means, 1):
        torch.testing.assert_close(metrics[f"mtp_{d}"] / counts(batch, GLM5)[f"mtp_{d}"], mean, rtol=1e-10, atol=0)


def equal_leaves(one, other):
    one, other = flatten(one), flatten(other)
    return {path for path in one if torch.equal(one[path], other[path])}


def test_what_is_detached_learns_nothing_from_it_and_all_else_as_before():
    params, batch = random_params(GLM5, dtype=F64), packed_batch(GLM5)
    plain, attached, trunk, head = (
        grads_of(params, batch, GLM5, **settings)[2]
        for settings in ({"coef": 0.0}, {}, {"detach_trunk": True}, {"detach_head": True})
    )
    paths = {path for path in flatten(params) if "indexer" not in path and "router_bias" not in path}
    layers = {path for path in paths if path.startswith("layers.")} | {"norm"}
    assert equal_leaves(plain, attached) & paths == set()
    assert equal_leaves(plain, trunk) & paths == layers
    assert equal_leaves(attached, trunk) & paths == {p for p in paths if p.startswith("mtp.")} | {"head"}
    assert equal_leaves(plain, head) & paths == {"head"}
    assert equal_leaves(attached, head) & paths == paths - {"head"}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_depths_share_the_keys_of_the_first_on_request(shared, recompute):
    cfg = replace(GLM5, num_mtp_depths=3)
    params, batch = random_params(cfg, dtype=F64), packed_batch(cfg)
    used, selected = [], []

    def sparse_attention(q, keys, chosen, *rest):
        used.append(chosen)
        return TORCH.sparse_attention(q, keys, chosen, *rest)

    def select(*args):
        selected.append(TORCH.select(*args))
        return selected[-1]

    kernels = TORCH._replace(sparse_attention=sparse_attention, select=select)
    terms = Terms(indexer=IndexerConfig(stage="sparse"), mtp=MTPConfig(share_indices=shared))
    loss(params, batch, cfg, terms=terms, kernels=kernels, recompute=recompute)
    first, *later = used[-3:]
    assert first is selected[3] and len(selected) == (4 if shared else 6)  # three layers have an indexer
    assert all((one is first) == shared for one in later)
    assert shared or not any(torch.equal(one, first) for one in later)
