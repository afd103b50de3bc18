"""The model as a function: causal, document-aware, the same in a batch, compiled, vectorised or as a module."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import FAMILIES, distance, random_batch, random_params, tiny
from torch._dynamo.testing import CompileCounterWithBackend

import glm5fn
from glm5fn import attn_gqa, flatten, forward, forward_mtp, loss, mlp, value_and_grad
from glm5fn.block import block
from glm5fn.flops import flops_per_token
from glm5fn.kernels import REFERENCE
from glm5fn.settings import PLAIN, IndexerConfig, MTPConfig, RouterConfig, Terms
from glm5fn.tree import tree_map

EACH_FAMILY = pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
F64 = torch.float64


ALL = Terms(
    indexer=IndexerConfig(stage="sparse", coef=0.5),
    router=RouterConfig(balance_coef=0.1, z_coef=0.01),
    mtp=MTPConfig(coef=0.3),
)
ONCE = dict.fromkeys(("labels", "real", "documents", "mtp_1", "mtp_2"), 1)


def grads_of(params, batch, cfg, terms=ALL, **settings):
    """The loss with all terms that the model has, and its gradients."""
    (value, _), grads = value_and_grad(partial(loss, batch=batch, cfg=cfg, terms=terms, **settings))(params)
    return {"value": value, **grads}


@EACH_FAMILY
def test_fast_kernels_give_the_loss_and_gradients_of_the_slow_ones(changes):
    cfg = tiny(**changes)
    params, batch = random_params(cfg, dtype=F64), random_batch(cfg)
    batch["segments"] = torch.tensor([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9, [1] + [2] * 8])
    assert distance(grads_of(params, batch, cfg), grads_of(params, batch, cfg, kernels=REFERENCE)) < 1e-10


def test_blocks_run_on_params_and_x_alone():
    cfg, x = tiny(), torch.randn(2, 5, 22)
    layer = random_params(cfg)["layers"]["0"]
    assert attn_gqa(layer["attn"], x).shape == x.shape
    assert mlp(layer["ffn"], x).shape == x.shape


@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_matrices_the_head_and_causal_pairs(tied):
    attn, ffn, head = (6 + 3 + 3 + 6) * 8 * 22, 3 * 26 * 22, 29 * 22
    pairs = 2 * 6 * 8 * (1 + 2 + 3 + 4 + 5) / 5  # layers, heads, head dim, keys of a query on average
    counted = 6 * (2 * (attn + ffn) + head) + 3 * 2 * 2 * pairs
    assert flops_per_token(tiny(tie_word_embeddings=tied), 5, PLAIN) == counted


@EACH_FAMILY
def test_a_token_changes_no_logits_before_it_and_some_after(changes):
    cfg = tiny(**changes)
    params, tokens = random_params(cfg), random_batch(cfg)["tokens"]
    for at in (0, 4, 8):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 1) % cfg.vocab_size
        before, after = forward(params, tokens, cfg), forward(params, other, cfg)
        # With experts the number of rows that a product has may change, and with it the rounding.
        rounding = 1e-6 * float(before.abs().max()) if cfg.n_routed_experts else 0
        torch.testing.assert_close(before[:, :at], after[:, :at], rtol=0, atol=rounding)
        reached = slice(at, at + 1 if cfg.index_topk else None)  # where keys are selected, it may be none of them
        assert (before[:, reached] != after[:, reached]).any(-1).all()


@EACH_FAMILY
def test_a_logit_has_no_gradient_at_later_tokens(changes):
    cfg = tiny(**changes | {"tie_word_embeddings": False})
    params, tokens = random_params(cfg, dtype=F64), torch.arange(1, 10)[None]  # a row of the embedding for each
    embed, direction = params["embed"].requires_grad_(), random_params(cfg, seed=3, dtype=F64)["head"][:, 0]
    main, further = forward_mtp(params, tokens, cfg)
    for depth, logits in enumerate((main, *further)):
        for at in range(9 - depth):
            (slope,) = torch.autograd.grad(logits[0, at] @ direction, embed, retain_graph=True)
            reached = slope.any(-1)[1:]
            assert reached[at] and reached[at + depth] and not reached[at + depth + 1 :].any()
            if at < (cfg.index_topk or 9):  # a query with no more keys than slots meets them all
                assert reached[: at + depth + 1].all()


@EACH_FAMILY
def test_packed_documents_give_the_loss_and_gradients_of_separate_ones(changes):
    cfg = tiny(**changes)
    params, lengths = random_params(cfg, dtype=F64), (7, 9, 1)
    row = random_batch(cfg, 1, 20)
    segments = torch.tensor([1] * 7 + [2] * 9 + [3] * 1 + [0] * 3)[None]
    targets = row["targets"].masked_fill(segments == 0, -100)
    packed = grads_of(params, {"tokens": row["tokens"], "targets": targets, "segments": segments}, cfg, count=ONCE)
    alone, start = None, 0
    for length in lengths:
        part = {name: row[name][:, start : start + length] for name in ("tokens", "targets")}
        grads = grads_of(params, part, cfg, count=ONCE)
        alone = grads if alone is None else tree_map(torch.add, alone, grads)
        start += length
    assert distance(packed, alone) < 1e-10


def test_another_document_changes_nothing():
    cfg = tiny()
    params, tokens = random_params(cfg), random_batch(cfg)["tokens"]
    segments = torch.tensor([1] * 4 + [2] * 5).expand(3, -1)
    other = tokens.clone()
    other[:, :4] = 0
    one, two = (forward(params, t, cfg, segments=segments)[:, 4:] for t in (tokens, other))
    assert torch.equal(one, two)


def test_given_positions_turn_the_heads():
    cfg = tiny()
    params, tokens = random_params(cfg, dtype=F64), random_batch(cfg)["tokens"]
    steps = torch.arange(9).expand(3, -1)
    plain = forward(params, tokens, cfg)
    assert torch.equal(forward(params, tokens, cfg, steps), plain)
    torch.testing.assert_close(forward(params, tokens, cfg, steps + 30), plain, rtol=1e-10, atol=1e-10)  # relative
    assert not torch.allclose(forward(params, tokens, cfg, steps * 2), plain)


@EACH_FAMILY
def test_padding_rows_are_finite_and_have_no_gradient(changes):
    cfg = tiny(**changes)
    params, batch = random_params(cfg), random_batch(cfg, 2)
    batch["segments"] = torch.tensor([[0] * 9, [0] * 4 + [1] * 5])
    batch["targets"] = batch["targets"].masked_fill(batch["segments"] == 0, -100)
    grads = grads_of(params, batch, cfg, count=ONCE)
    alone = grads_of(
        params, {name: part[1:, 4:] for name, part in batch.items() if name != "segments"}, cfg, count=ONCE
    )
    assert all(torch.isfinite(leaf).all() for leaf in flatten(grads).values())
    assert distance(grads, alone) < 1e-5


def test_a_row_alone_gives_the_logits_that_it_gives_in_a_batch():
    cfg = tiny()
    params, tokens = random_params(cfg, dtype=F64), random_batch(cfg)["tokens"]
    together = forward(params, tokens, cfg)
    for row in range(3):
        torch.testing.assert_close(forward(params, tokens[row : row + 1], cfg)[0], together[row], rtol=0, atol=1e-12)


def test_swapping_any_two_of_the_four_norms_moves_the_logits():
    cfg = tiny()
    params, tokens = random_params(cfg), random_batch(cfg)["tokens"]
    logits, layer = forward(params, tokens, cfg), params["layers"]["0"]
    norms = [name for name in layer if name.endswith("norm")]
    assert len(norms) == 4
    for i, one in enumerate(norms):
        for other in norms[i + 1 :]:
            swapped = layer | {one: layer[other], other: layer[one]}
            moved = forward(params | {"layers": params["layers"] | {"0": swapped}}, tokens, cfg)
            assert (moved - logits).abs().max() > 1e-3


def test_a_tied_embedding_is_one_leaf_whose_gradient_is_the_sum_of_both_uses():
    cfg = tiny(**FAMILIES["glm5_dense, tied"])
    params, batch = random_params(cfg, dtype=F64), random_batch(cfg)
    apart = params | {"head": params["embed"]}
    tied, untied = grads_of(params, batch, cfg), grads_of(apart, batch, replace(cfg, tie_word_embeddings=False))
    assert "head" not in tied
    torch.testing.assert_close(tied["embed"], untied["embed"] + untied["head"], rtol=1e-12, atol=1e-14)


@EACH_FAMILY
def test_recomputation_changes_no_bit_on_two_threads(changes, two_threads):
    cfg = tiny(**changes, vocab_size=1024, hidden_size=64)
    params, batch = random_params(cfg), random_batch(cfg, 4, 48)
    kept, again = grads_of(params, batch, cfg), grads_of(params, batch, cfg, recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(flatten(kept).values(), flatten(again).values(), strict=True))


@EACH_FAMILY
def test_the_module_view_gives_the_same_logits(changes):
    cfg = tiny(**changes)
    params, tokens = random_params(cfg), random_batch(cfg)["tokens"]
    shell = glm5fn.Shell(cfg)
    assert shell.state_dict().keys() == flatten(params).keys()
    called = torch.func.functional_call(shell, flatten(params), (tokens,), strict=True)
    assert torch.equal(called, forward(params, tokens, cfg))


def test_the_module_view_exports():
    cfg = tiny()
    params, tokens = random_params(cfg), random_batch(cfg)["tokens"]
    shell = glm5fn.Shell(cfg)
    shell.load_state_dict(flatten(params), assign=True)
    exported = torch.export.export(shell, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), forward(params, tokens, cfg), rtol=1e-5, atol=1e-6)


@EACH_FAMILY
def test_functional_gradients_equal_value_and_grad(changes):
    cfg = tiny(**changes)
    params, batch = random_params(cfg, dtype=F64), random_batch(cfg)
    function = partial(loss, batch=batch, cfg=cfg, terms=ALL)
    grads, (value, _) = torch.func.grad_and_value(function, has_aux=True)(params)
    assert distance({"value": value, **grads}, grads_of(params, batch, cfg)) == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@EACH_FAMILY
def test_gradients_of_each_row_by_vmap_equal_those_taken_one_by_one(changes):
    cfg = tiny(**changes)
    params, batch = random_params(cfg, dtype=F64), random_batch(cfg)

    def grads(tokens, targets):
        row = {"tokens": tokens[None], "targets": targets[None]}
        return torch.func.grad(lambda p: loss(p, row, cfg)[0])(params)

    each = torch.func.vmap(grads)(batch["tokens"], batch["targets"])
    for i in range(3):
        one = grads(batch["tokens"][i], batch["targets"][i])
        assert distance(tree_map(lambda leaf, i=i: leaf[i], each), one) < 1e-10


def test_gradients_accumulate_in_place_to_those_of_the_whole_batch():
    cfg = tiny()
    params, batch = random_params(cfg, dtype=F64), random_batch(cfg)
    run = value_and_grad(partial(loss, cfg=cfg, count={"labels": 20}))
    _, whole = run(params, batch)
    grads = {}
    for row in range(3):
        kept = dict(flatten(grads))
        _, grads = run(params, {name: part[row : row + 1] for name, part in batch.items()}, into=grads)
        assert all(flatten(grads)[path] is leaf for path, leaf in kept.items())
    assert distance(grads, whole) < 1e-12
    assert not any(leaf.requires_grad or leaf.grad is not None for leaf in flatten(params).values())


# Compiling takes long: one with experts is compiled always, and all are among the slow tests.
EACH_KIND = pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, marks=() if name == "glm4" else pytest.mark.slow) for name, changes in FAMILIES.items()],
    ids=FAMILIES,
)


@EACH_KIND
def test_the_compiled_block_is_one_graph_for_each_kind_of_layer_and_equals_eager(changes):
    torch._dynamo.reset()
    cfg = tiny(**changes)
    params, batch = random_params(cfg), random_batch(cfg)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    kinds = {(cfg.is_moe(i), cfg.indexers[i : i + 1]) for i in range(cfg.num_hidden_layers)}
    for recompute in (False, True):
        settings = {"terms": PLAIN, "recompute": recompute}
        assert (
            distance(grads_of(params, batch, cfg, block=compiled, **settings), grads_of(params, batch, cfg, PLAIN))
            < 1e-5
        )
        # Layers that select are another graph when they run again with the keys that they have.
        again = sum(indexer == ("full",) for _, indexer in kinds) if recompute else 0
        assert graphs.frame_count == len(kinds) + again


@pytest.mark.slow
@EACH_FAMILY
def test_the_compiled_block_equals_eager_with_every_term(changes):
    torch._dynamo.reset()
    cfg = tiny(**changes)
    params, batch = random_params(cfg), random_batch(cfg)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert distance(grads_of(params, batch, cfg, block=compiled), grads_of(params, batch, cfg)) < 1e-5
    if cfg.index_topk:  # a layer whose indexer others teach, too, hands on more, and runs again on it
        served = replace(ALL, indexer=replace(ALL.indexer, teacher="served"))
        compared = grads_of(params, batch, cfg, served, block=compiled, recompute=True)
        assert distance(compared, grads_of(params, batch, cfg, served)) < 1e-5


@pytest.mark.slow
def test_the_block_compiled_by_inductor_equals_eager():
    torch._dynamo.reset()
    cfg = tiny()
    params, batch = random_params(cfg), random_batch(cfg)
    compared = grads_of(params, batch, cfg, block=torch.compile(block, fullgraph=True))
    assert distance(compared, grads_of(params, batch, cfg)) < 1e-5
