"""Parameters, FLOPs and memory, against numbers that were published or counted by hand."""

import time
from dataclasses import replace

import pytest

from configs import MODELS, RUNS
from glm5fn.config import ModelConfig
from glm5fn.flops import flops_per_token, parameters
from glm5fn.plan import at_rest, layout, model
from glm5fn.settings import IndexerConfig, Layout, MeshConfig, MTPConfig, OptimConfig, Terms

TINY = ModelConfig(
    model_type="glm5_dense",
    vocab_size=29,
    hidden_size=22,
    intermediate_size=26,
    num_hidden_layers=3,
    num_attention_heads=3,
    attention="mla",
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
)
MOE = {
    "n_routed_experts": 7,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
DSA = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk_freq": 2}
# One layer's matrices: q_a, q_b, kv_a, kv_b, o; a dense MLP; a router, a shared and the two chosen experts; an indexer.
ATTN = 10 * 22 + 3 * 10 * 10 + 18 * 22 + 3 * 11 * 14 + 22 * 3 * 5
DENSE, SPARSE = 3 * 26 * 22, 7 * 22 + (1 + 2) * 3 * 12 * 22
INDEXER, HEAD, JOIN = 2 * 8 * 10 + 8 * 22 + 2 * 22, 29 * 22, 22 * 44
PAIR = 3 * (6 + 4 + 5)  # of each layer, what a query and a key multiply
STEPS = 9
KEYS = (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9) / 9  # of a query, on average
KEPT = (1 + 2 + 3 + 4 * 6) / 9


def flops(stage="frozen", mtp=0.1, **changes):
    terms = Terms(indexer=IndexerConfig(stage=stage), mtp=MTPConfig(coef=mtp))
    return flops_per_token(replace(TINY, **changes), STEPS, terms)


def test_latent_attention_costs_its_matrices_and_the_dims_of_keys_and_values():
    assert flops() == pytest.approx(6 * (3 * (ATTN + DENSE) + HEAD + 3 * PAIR * KEYS))
    assert flops(tie_word_embeddings=True) == flops()


def test_of_the_experts_those_cost_that_a_token_is_sent_to():
    assert flops(**MOE) == pytest.approx(6 * (3 * ATTN + DENSE + 2 * SPARSE + HEAD + 3 * PAIR * KEYS))


def test_sparse_attention_costs_the_selected_keys_and_the_indexer_all_pairs_forward_only():
    kinds = replace(TINY, **DSA).indexers
    assert kinds == ("full", "full", "shared")
    indexers = 2 * 2 * (INDEXER + 2 * 8 * KEYS)
    assert flops(**DSA) == pytest.approx(6 * (3 * (ATTN + DENSE) + HEAD + 3 * PAIR * KEPT) + indexers)


def test_an_indexer_that_learns_costs_the_gradients_of_its_weights_and_scores():
    learning = 2 * (2 * INDEXER + 4 * 2 * 8 * KEPT)
    assert flops("sparse", **DSA) == pytest.approx(flops(**DSA) + learning)


def test_in_the_dense_warm_up_all_but_the_indexers_runs_forward_only_and_on_all_keys():
    indexers = 2 * (4 * INDEXER + 6 * 2 * 8 * KEYS)
    assert flops("dense-warmup", **DSA) == pytest.approx(2 * (3 * (ATTN + DENSE) + HEAD + 3 * PAIR * KEYS) + indexers)


def test_multi_token_prediction_that_is_not_trained_costs_nothing():
    assert flops(mtp=0.0, **MOE, num_nextn_predict_layers=1) == flops(**MOE)


@pytest.mark.parametrize("topk", [9, 64])
def test_an_indexer_that_has_nothing_to_drop_costs_nothing(topk):
    assert flops(**DSA | {"index_topk": topk}) == flops()


@pytest.mark.parametrize("sets, depths, run", [(1, 0, 1), (1, 3, 3), (2, 0, 2), (2, 1, 1)])
def test_each_depth_of_multi_token_prediction_costs_a_join_a_layer_and_the_head(sets, depths, run):
    more = {"num_nextn_predict_layers": sets, "num_mtp_depths": depths}
    depth = 6 * (JOIN + ATTN + SPARSE + HEAD + PAIR * KEPT) + 2 * (INDEXER + 2 * 8 * KEYS)
    assert flops(**MOE, **DSA, **more) - flops(**MOE, **DSA) == pytest.approx(run * depth)


def test_parameters_are_counted_by_hand_without_the_routers_bias():
    norms = 3 * (2 * 22 + 10 + 14) + 22
    unmet = 2 * 5 * 3 * 12 * 22
    cfg = replace(TINY, **MOE, num_nextn_predict_layers=1)
    main = 3 * ATTN + DENSE + 2 * SPARSE + 2 * HEAD + norms
    mtp = JOIN + ATTN + SPARSE + 5 * 22 + 10 + 14  # norms of embedding, state, attention, MLP and result
    assert parameters(cfg) == (main + unmet, main, HEAD, mtp + unmet // 2, mtp)
    tied = parameters(replace(cfg, tie_word_embeddings=True))
    assert tied.total == main + unmet - HEAD and tied.embedding == 0  # the head's matrix is in every token's way


@pytest.mark.parametrize(
    "name, total, active, without",
    [
        ("glm5-744b", 743_911_199_232, 41_784_709_632, 40_833_126_912),
        ("glm5.1-744b", 743_911_199_232, 41_784_709_632, 40_833_126_912),
        ("glm5.2-744b", 743_377_000_704, 41_250_511_104, 40_298_928_384),
    ],
)
def test_glm5_has_its_published_counts(name, total, active, without):
    counted = parameters(MODELS[name])
    assert (counted.total, counted.active, counted.active - counted.embedding) == (total, active, without)
    assert MODELS[name].mtp_depths == 3


@pytest.mark.parametrize(
    "name, total, active, mtp, published, of",
    [
        # The GLM-4.5 paper (arXiv 2508.06471) counts neither embedding nor head; 355B has the MTP layer, 106B has not.
        ("glm4.5-355b", 352_797_814_784, 33_632_251_904, 3_988_069_632, "355B-A32B", "with"),
        ("glm4.5-air-106b", 106_852_245_504, 13_424_123_904, 2_375_059_456, "106B-A12B", "without"),
    ],
)
def test_glm45_has_its_published_counts(name, total, active, mtp, published, of):
    counted = parameters(MODELS[name])
    assert counted[:2] == (total, active) and counted.mtp == mtp
    body, met = total - 2 * counted.embedding, active - 2 * counted.embedding
    assert f"{(body + mtp * (of == 'with')) / 1e9:.0f}B-A{met / 1e9:.0f}B" == published


def test_a_rank_of_256_holds_its_part_of_glm5():
    wide = ("embed", "q_rank", "kv_rank")
    run = replace(RUNS["glm5-744b"], mesh=MeshConfig(dp_shard=256), layout=Layout(store={"fsdp": wide, "rest": wide}))
    whole = 79 * 2 * 128  # the indexers' norms, that of the MTP layer included; the rest is cut into 256 parts
    held = (753_864_119_552 - whole) // 256 + whole
    found = at_rest(run)
    assert (found["gradients"], found["moments"]) == (4 * held, 8 * held)


def test_the_counts_of_glm5_are_told_without_waiting():
    start = time.perf_counter()
    said = str([*model(RUNS["glm5-744b"]), *layout(RUNS["glm5-744b"])])
    assert time.perf_counter() - start < 5
    for number in ("743,911,199,232", "41,784,709,632", "40,833,126,912", "9,952,920,320"):
        assert number in said


def test_the_rank_that_holds_the_most_is_counted():
    run = replace(RUNS["dense-tiny"], model=replace(TINY, **MOE), optim=OptimConfig(name="sgd"))
    counted, bias = parameters(run.model).total, 2 * 7

    def bytes_of(held):
        return {"parameters": 4 * (held + bias), "gradients": 4 * held, "moments": 0}

    assert at_rest(run) == bytes_of(counted)
    # 22 columns over 3 ranks: 8, 8 and 6. Rows without that axis are whole on every rank.
    uncut = 3 * (3 * 10 * 10 + 3 * 11 * 14 + 10 + 14)
    cut = replace(
        run,
        mesh=MeshConfig(dp_shard=3, dp_replicate=2),
        layout=Layout(store={"fsdp": ("embed",), "rest": ("embed",)}),
    )
    assert at_rest(cut) == bytes_of(uncut + (counted - uncut) // 22 * 8)
    said = dict(layout(cut))
    assert said["ranks"] == "6 (dp-replicate 2 x dp-shard 3 x cp 1 x tp 1, ep 1 of them)"
    assert "embed 22 over 3" in said["uneven parts"] and "more" in said["uneven parts"]


@pytest.mark.parametrize("stage, indexers, others", [("frozen", 0, 1), ("dense-warmup", 1, 0), ("sparse", 1, 1)])
def test_gradients_and_moments_are_held_of_what_learns(stage, indexers, others):
    run = replace(RUNS["dense-tiny"], model=replace(TINY, **DSA), indexer=IndexerConfig(stage=stage))
    indexer = 2 * (INDEXER + 2 * 8)  # two layers select; two vectors of a norm
    learning = indexers * indexer + others * (parameters(run.model).total - indexer)
    assert (at_rest(run)["gradients"], at_rest(run)["moments"]) == (4 * learning, 8 * learning)


def test_deterministic_runs_hold_gradients_in_fp64():
    run, count = RUNS["dense-tiny"], parameters(RUNS["dense-tiny"].model).total
    assert [at_rest(replace(run, deterministic=on))["gradients"] for on in (False, True)] == [4 * count, 8 * count]


def test_rows_that_do_not_divide_are_told():
    run = replace(RUNS["dense-tiny"], mesh=MeshConfig(cp=3))
    assert dict(layout(run))["uneven parts"].startswith("rows of 256 tokens over 6 parts: 2 of padding")


def test_the_largest_tensor_is_named():
    said = dict(layout(replace(RUNS["dense-tiny"], model=replace(TINY, **MOE))))
    assert said["largest tensor"] == "layers.2.ffn.experts.gate_up (7, 2, 12, 22), whole 14.4 KiB"
