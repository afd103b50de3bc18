"""Continuations of prompts: greedy, drawn, by drafts that are verified, and on several ranks."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_layouts import GRIDS, HEADS, grid_of
from test_oracle import EXPERTS, GLM4, randomize
from test_oracle_glm5 import CFG_M, make_oracle, with_stable_topk
from tiny import FAMILIES, GLM5, random_params, tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from configs import LAYOUTS
from glm5fn import ConfigError, flatten, forward, forward_mtp, load, mesh, speculate
from glm5fn.collectives import comm_for
from glm5fn.generate import generate
from glm5fn.model import Engine, compiled, model_specs
from glm5fn.sampling import Sampling, distribution, draw, verified

F64 = torch.float64
MODEL = GLM5 | {"n_routed_experts": 8, "max_position_embeddings": 128}
STOPPED = 14  # prompts of which two have a token early that the third never has
DRAFTS = pytest.mark.parametrize("drafts", [0, 1, 2, 4])


def make(**changes):
    cfg = tiny(**MODEL | changes)
    return cfg, random_params(cfg, dtype=F64)


def random_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 29, (n,), generator=generator).tolist() for n in lengths]


def run(params, prompts, cfg, engine=Engine(), **how):  # noqa: B008
    *_, rows = generate(params, prompts, cfg, engine, **how)
    return rows


def slow(params, prompt, cfg, most):
    """Greedy decoding in which each token is computed from the whole of those before it, and its log-probabilities."""
    ids, logs = list(prompt), []
    for _ in range(most):
        logits = forward(params, torch.tensor([ids]), cfg)[0, -1]
        ids.append(int(logits.argmax()))
        logs.append(float(logits.log_softmax(-1)[ids[-1]]))
    return ids[len(prompt) :], logs


@pytest.mark.parametrize("name", FAMILIES)
def test_each_row_of_a_batch_has_the_tokens_that_whole_forward_passes_give_it(name):
    cfg = tiny(**FAMILIES[name])
    params, prompts = random_params(cfg, dtype=F64), random_prompts((3, 9, 1))
    for row, prompt in zip(run(params, prompts, cfg, most=12), prompts, strict=True):
        ids, logs = slow(params, prompt, cfg, 12)
        assert row.ids == ids and row.finish == "length"
        torch.testing.assert_close([token.logprob for token in row.tokens], logs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        pytest.param(FAMILIES["glm4"], (19,), id="glm4 alone"),
        *(pytest.param(changes, (3, 19, 1), id=name, marks=pytest.mark.slow) for name, changes in FAMILIES.items()),
        pytest.param(FAMILIES["glm5"], (19,), id="glm5 alone", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_write_the_same_and_are_compiled_once_for_each_kind(changes, lengths):
    cfg = tiny(**changes)
    params, prompts = random_params(cfg, dtype=F64), random_prompts(lengths)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    with patch("torch.compile", partial(torch.compile, backend=graphs)):
        engine = Engine(block=compiled(dynamic=True))
    counts = []
    for found in generate(params, prompts, cfg, engine, most=24):
        ids = [row.ids for row in found]
        counts.append(sum(len(one.graph.nodes) > 0 for one in graphs.graphs))
    assert ids == [row.ids for row in run(params, prompts, cfg, most=24)]
    kinds = {(cfg.is_moe(i), cfg.indexers[i : i + 1]) for i in range(cfg.num_hidden_layers)}
    assert counts[0] == 0 and counts[1:] == [len(kinds)] * 23  # a prompt is run by the layers as they are


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_drafts_change_no_token_of_twenty_prompts(drafts):
    cfg, params = make()
    prompts = random_prompts([1 + n % 11 for n in range(20)])
    plain = run(params, prompts, cfg, most=60)
    found = run(params, prompts, cfg, most=60, drafts=drafts)
    assert [row.ids for row in found] == [row.ids for row in plain]
    assert sum(row.rounds for row in found) < sum(row.rounds for row in plain)  # some are kept


def test_every_draft_is_what_the_depth_predicts_from_all_tokens_before_it():
    """So no depth stands on a rejected token, and none falls behind, whatever the rows of a batch keep."""
    cfg, params = make(num_mtp_depths=3)
    prompts, seen, before = random_prompts((1, 7, 2)), [], []

    def noted(*args):
        drafts, depths = speculate.draft(*args)
        seen.append((drafts.tolist(), [cache.counts.tolist() for cache in depths.caches]))
        return drafts, depths

    with patch("glm5fn.generate.draft", noted):
        for rows in generate(params, prompts, cfg, Engine(), most=14, drafts=3):
            texts = [[*row.prompt, *row.ids] for row in rows]
            if seen:
                drafted, counts = seen[-1]
                for row, (ids, drafts) in enumerate(zip(before, drafted, strict=True)):
                    for depth, found in enumerate(drafts):
                        _, further = forward_mtp(params, torch.tensor([[*ids, *drafts[:depth]]]), cfg)
                        # The last place of this depth's own input is that of the last token but depth + 1.
                        assert found == int(further[depth][0, len(ids) - 2].argmax())
                        assert counts[depth][row] == max(len(ids) - 1 - depth, 0)
            before = texts
            if any(row.finish for row in rows):
                break
    assert len(seen) > 6


@DRAFTS
def test_a_row_ends_with_its_first_stop_and_the_others_go_on(drafts):
    cfg, params = make()
    prompts = random_prompts((4, 9, 2), seed=STOPPED)
    wanted = [slow(params, prompt, cfg, 12)[0] for prompt in prompts]
    stops = {wanted[0][0], wanted[1][5]}
    assert wanted[1][5] not in wanted[1][:5] and not stops & set(wanted[2])
    found = run(params, prompts, cfg, most=12, stops=stops, drafts=drafts)
    for row, ids in zip(found, wanted, strict=True):
        end = next((n for n, token in enumerate(ids, 1) if token in stops), 12)
        assert row.ids == ids[:end]
    assert [row.finish for row in found] == ["stop", "stop", "length"]


@DRAFTS
def test_a_row_ends_where_the_models_positions_end(drafts):
    cfg, params = make(max_position_embeddings=16)
    prompts = random_prompts((15, 4))
    found = run(params, prompts, cfg, most=30, drafts=drafts)
    assert [len(row.tokens) for row in found] == [1, 12] and {row.finish for row in found} == {"length"}
    assert found[1].ids == slow(params, prompts[1], cfg, 12)[0]


def test_a_reason_of_the_callers_ends_a_row():
    cfg, params = make()
    (row,) = run(params, [[1, 2]], cfg, most=9, drafts=4, ended=lambda ids: len(ids) == 3)
    assert len(row.ids) == 3 and row.finish == "stop"


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([[]], {}, "prompt 1 has no token"),
        ([[1], [29]], {}, r"prompt 2 has id 29: must be from 0 to vocab_size \(29\) - 1"),
        ([[1] * 128], {}, "prompt 1 has 128 tokens: must have fewer than max_position_embeddings"),
        ([[1]], {"most": 0}, "max-new-tokens"),
        ([[1]], {"drafts": -1}, "drafts"),
        ([[1]], {"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ([[1]], {"sampling": Sampling(top_p=0.0)}, "top-p"),
        ([[1]], {"sampling": Sampling(top_k=-1)}, "top-k"),
        ([[1]], {"sampling": Sampling(repetition_penalty=1e-320)}, "repetition-penalty"),
        ([[1]], {"sampling": Sampling(temperature=float("inf"))}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused(prompts, how, message):
    cfg, params = make()
    with pytest.raises(ConfigError, match=message):
        run(params, prompts, cfg, **{"most": 3, **how})


def test_drafts_of_a_model_without_multi_token_prediction_are_refused():
    cfg = tiny()
    with pytest.raises(ConfigError, match="has no multi-token prediction"):
        run(random_params(cfg), [[1]], cfg, most=3, drafts=1)


# --- what is drawn ---


@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.1])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50])
def test_probabilities_are_those_of_transformers(top_k, top_p):
    logits = torch.randn(29, generator=torch.Generator().manual_seed(2)) * 3
    sampling = Sampling(repetition_penalty=1.7, temperature=0.8, top_k=top_k, top_p=top_p)
    there = [3, 28, 3, 11]
    expected = logits[None]
    steps = [RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(0.8)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    for step in (*steps, TopPLogitsWarper(top_p)):
        expected = step(torch.tensor([there]), expected)
    torch.testing.assert_close(
        distribution(logits, sampling, there), expected[0].softmax(-1).double(), rtol=1e-5, atol=1e-7
    )


def test_of_equal_logits_the_lower_id_is_taken():
    logits = torch.tensor([1.0, 4.0, 4.0, 4.0])
    assert draw(distribution(logits, Sampling(), []), np.random.default_rng(0)) == 1
    assert distribution(logits, Sampling(temperature=1.0, top_k=2), []).tolist() == [0, 0.5, 0.5, 0]


def test_a_temperature_near_zero_takes_the_highest():
    logits = torch.tensor([1.0, 4.0, 3.9])
    assert distribution(logits, Sampling(temperature=1e-320), []).tolist() == [0, 1, 0]


def test_the_fewest_of_many_tokens_with_enough_probability_are_kept():
    logits = torch.zeros(5000).index_fill(0, torch.tensor([7, 4000]), 1.0)
    kept = distribution(logits, Sampling(temperature=1.0, top_p=0.5), []).nonzero()[:, 0].tolist()
    assert kept[:2] == [0, 1] and 7 in kept and 4000 in kept  # of equals the first
    assert len(kept) == pytest.approx(2500, abs=3)


def test_weights_that_give_no_numbers_are_told():
    cfg, params = make()
    params["norm"].fill_(torch.nan)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(mesh.RunError, match="not finite"):
            run(params, [[1, 2]], cfg, most=3, sampling=sampling)


def test_room_is_made_for_no_more_tokens_than_the_model_has_positions():
    cfg, params = make()
    (row,) = run(params, [[1] * 120], cfg, most=10**15, drafts=2)
    assert len(row.tokens) == 8


def fits(counts, shares):
    """Pearson's statistic of what was counted, in standard deviations above what chance gives."""
    expected = shares * counts.sum()
    kept = expected > 5
    assert not counts[shares == 0].any()
    rest = torch.tensor([counts[~kept].sum(), expected[~kept].sum()])
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    if rest[1] > 5:
        statistic += float((rest[0] - rest[1]) ** 2 / rest[1])
    degrees = int(kept.sum()) - (rest[1] <= 5).item()
    return (statistic - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=1.0), marks=pytest.mark.slow),
        Sampling(temperature=0.8, top_k=9, top_p=0.9),
    ],
)
def test_drafts_that_are_verified_are_distributed_as_the_model_would_draw_them(sampling):
    generator = torch.Generator().manual_seed(3)
    q, p, after = (distribution(torch.randn(29, generator=generator) * 2, sampling, []) for _ in range(3))
    counts = torch.zeros(29, 29, dtype=F64)
    first, draws = torch.zeros(29, dtype=F64), np.random.default_rng(3)
    for _ in range(20000):
        found = verified([draw(q, draws)], [q], iter((p, after)), draws)
        first[found[0]] += 1
        if len(found) == 2:
            counts[found[0], found[1]] += 1
    assert fits(first, p) < 3.1  # one in a thousand is above
    kept = torch.minimum(p, q)
    assert fits(counts.flatten(), (kept[:, None] * after / kept.sum()).flatten()) < 3.1
    assert (first - q * 20000).abs().max() > 1000  # what was proposed is another distribution


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_twenty_thousand_drawn_pairs_have_the_models_own_distribution(drafts):
    cfg, params = make()
    sampling, prompt = Sampling(temperature=1.3, seed=5), [4, 1, 7, 7, 9]
    shares = torch.zeros(29, 29, dtype=F64)
    logits = forward(params, torch.tensor([prompt]), cfg)[0, -1]
    for token, share in enumerate(distribution(logits, sampling, prompt)):
        logits = forward(params, torch.tensor([[*prompt, token]]), cfg)[0, -1]
        shares[token] = share * distribution(logits, sampling, [*prompt, token])
    counts = torch.zeros(29, 29, dtype=F64)
    for first in range(0, 20000, 500):
        # Three tokens, so that a whole round of drafts follows the first.
        for row in run(params, [prompt] * 500, cfg, most=3, sampling=sampling, drafts=drafts, first=first):
            counts[row.ids[0], row.ids[1]] += 1
    assert fits(counts.flatten(), shares.flatten()) < 3.1


def test_what_a_row_draws_depends_on_its_number_and_the_seed_alone():
    cfg, params = make()
    prompts, sampling = random_prompts((3, 5, 4)), Sampling(temperature=2.0, seed=1)
    together = [row.ids for row in run(params, prompts, cfg, most=8, sampling=sampling)]
    alone = [run(params, [prompt], cfg, most=8, sampling=sampling, first=n)[0].ids for n, prompt in enumerate(prompts)]
    assert together == alone
    same = run(params, [prompts[0]] * 2, cfg, most=8, sampling=sampling)
    assert same[0].ids != same[1].ids
    assert run(params, [prompts[0]], cfg, most=8, sampling=Sampling(temperature=2.0, seed=2))[0].ids != alone[0]


# --- several ranks ---

SLOW = ("shard 2 x cp 2 x ep 4", "tp 4, in experts", "cp 2 x tp 2 x ep 2", "shard 2 x tp 2 x ep 2, in experts")
CELLS = [("latent", name) for name in ("shard 2", "ep 2", "cp 2", "cp 2, contiguous", "tp 2", *SLOW)]
CELLS = [
    pytest.param(*cell, marks=pytest.mark.slow if cell[1] in SLOW else ()) for cell in (*CELLS, ("grouped", "tp 2"))
]
SHARED = {  # sizes that ranks can share
    "latent": tiny(**MODEL | HEADS),
    "grouped": tiny(**FAMILIES["glm4_moe, experts"] | HEADS | {"num_key_value_heads": 2, "n_routed_experts": 8}),
}


def generated(grid, model, prompts, drafts):
    cfg, made = SHARED[model], grid_of(grid)
    whole = flatten(random_params(cfg, dtype=F64))

    def read(path, row, region):
        return whole[path][tuple(slice(start, start + size) for start, size in region)].clone()

    params = mesh.place(model_specs(cfg), cfg.dims, made, LAYOUTS["fsdp"], read)
    engine = Engine(comm=comm_for(made, F64, F64))
    rows = run(params, prompts, cfg, engine, most=10, drafts=drafts, share=mesh.data_rank(grid), stops={5, 11})
    return [(row.ids, row.finish, row.rounds) for row in rows]


@pytest.mark.parametrize(("model", "grid"), CELLS)
def test_every_grid_gives_the_tokens_of_one_process(model, grid, pools):
    cfg, grid, prompts = SHARED[model], GRIDS[grid], random_prompts((3, 9, 4))
    params = random_params(cfg, dtype=F64)
    for drafts, some in ((0, prompts), (0, prompts[2:]), (2, prompts), (2, prompts[:1])):
        expected = run(params, some, cfg, most=10, drafts=drafts, stops={5, 11})
        wanted = [(row.ids, row.finish, row.rounds) for row in expected]
        assert pools(grid.world)(generated, grid, model, some, drafts) == [wanted] * grid.world


# --- transformers ---


def oracles(name, directory):
    if name == "glm_moe_dsa":
        return make_oracle(CFG_M | {"index_n_heads": 8}, directory)
    kind, config, settings = {
        "glm4": (Glm4ForCausalLM, Glm4Config, GLM4),
        "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, EXPERTS),
    }[name]
    oracle = kind(config(**settings)).eval()
    randomize(oracle)
    oracle.save_pretrained(directory)
    return oracle


@pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers is 1")
@pytest.mark.parametrize("name", ["glm4", "glm4_moe", "glm_moe_dsa"])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    oracle = oracles(name, tmp_path)
    cfg, params = load(tmp_path)
    for lengths in ((7,), (7, 3, 12)):
        prompts = random_prompts(lengths, seed=6)
        width = max(lengths)
        tokens = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with patch.object(GlmMoeDsaIndexer, "forward", with_stable_topk(GlmMoeDsaIndexer.forward)):
            expected = oracle.generate(
                tokens, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        found = run(params, prompts, cfg, most=64)
        assert [row.ids for row in found] == expected[:, width:].tolist()
