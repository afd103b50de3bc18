"""Decoding token by token, in chunks and in batches equals the whole forward pass."""

import pytest
import torch
from tiny import FAMILIES, GLM5, LATENT, SPARSE, random_params, tiny

from glm5fn import forward
from glm5fn.decode import advance, bytes_of_token, init_cache, logits_of, prefill, trim
from glm5fn.kernels import TORCH
from glm5fn.model import Engine

F64 = torch.float64
KINDS = {
    **FAMILIES,
    "glm5, keys enough": GLM5 | {"index_topk": 64},
    "sparse, keys enough": SPARSE | {"index_topk": 64},
}


def close(found, expected, limit):
    assert (found - expected).abs().max() <= limit * expected.abs().max()


def make(name, dtype=F64):
    cfg = tiny(**KINDS[name])
    return cfg, random_params(cfg, dtype=dtype)


def random_tokens(rows, steps, seed=3):
    return torch.randint(0, 29, (rows, steps), generator=torch.Generator().manual_seed(seed))


class Noted:
    """An engine that notes which keys are selected, at the places of their queries and by the order of layers."""

    def __init__(self):
        self.found, self.place, self.calls = {}, 0, 0
        self.engine = Engine(kernels=TORCH._replace(select=self.select))

    def select(self, q, *rest):
        chosen = TORCH.select(q, *rest)
        for step in range(q.shape[1]):
            for row in range(q.shape[0]):
                kept = frozenset(chosen[row, step].tolist()) - {-1}
                self.found[self.calls, row, self.place + step] = kept
        self.calls += 1
        return chosen

    def at(self, place):
        self.place, self.calls = place, 0


def in_pieces(params, tokens, cfg, first, chunk, steps, noted):
    """The logits of the last token of the prompt, which is computed in chunks, and of the tokens after it."""
    cache, states = init_cache(cfg, len(tokens), 5, params["embed"].dtype), []
    for start in range(0, first, chunk):
        noted.at(start)
        x, cache = advance(params, tokens[:, start : min(start + chunk, first)], cache, cfg, noted.engine)
    states.append(x[:, -1])
    for at in range(first, first + steps):
        noted.at(at)
        x, cache = advance(params, tokens[:, at : at + 1], cache, cfg, noted.engine)
        states.append(x[:, 0])
    assert cache.length == first + steps and cache.counts.tolist() == [first + steps] * len(tokens)
    return logits_of(params, torch.stack(states, 1), cfg, noted.engine)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (F64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_chunks_and_steps_after_it_equal_the_whole_forward_pass(name, dtype, limit):
    (cfg, params), tokens, whole = make(name, dtype), random_tokens(2, 40), Noted()
    expected = forward(params, tokens, cfg, kernels=whole.engine.kernels)
    pieces = [(1, 1, 39), (3, 8, 9), (4, 3, 9), (5, 8, 9), (39, 1, 1), (39, 3, 1), (39, 8, 1)]
    for first, chunk, steps in pieces if dtype == F64 else pieces[3:]:
        noted = Noted()
        found = in_pieces(params, tokens, cfg, first, chunk, steps, noted)
        close(found, expected[:, first - 1 : first + steps], limit)
        assert all(whole.found[key] == kept for key, kept in noted.found.items())
        assert bool(noted.found) == (0 < cfg.index_topk < first + steps)


def test_a_chunk_never_sees_what_comes_after_it():
    cfg, params = make("glm5")
    tokens = random_tokens(1, 12)
    other = tokens.index_fill(1, torch.tensor([11]), 5)
    cache = init_cache(cfg, 1, 12, F64)
    _, cache = prefill(params, tokens[:, :3], cache, cfg, Engine())
    one, _ = advance(params, tokens[:, 3:], cache, cfg, Engine())
    two, _ = advance(params, other[:, 3:], cache, cfg, Engine())
    close(one[:, :-1], two[:, :-1], 1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_several_lengths_are_each_as_alone(name):
    cfg, params = make(name)
    rows = [random_tokens(1, n + 12, n) for n in (3, 9, 17)]
    padded = torch.cat([torch.nn.functional.pad(row, (29 - row.shape[1], 0), value=2) for row in rows])
    real = torch.stack([torch.arange(29) >= 29 - row.shape[1] for row in rows])
    for chunk in (3, 8):
        x, cache = prefill(params, padded[:, :17], init_cache(cfg, 3, 4, F64), cfg, Engine(), real[:, :17], chunk=chunk)
        more, cache = advance(params, padded[:, 17:], cache, cfg, Engine())
        assert cache.counts.tolist() == [15, 21, 29]
        found = logits_of(params, torch.cat((x, more), 1), cfg, Engine())
        for row, alone in enumerate(rows):
            close(found[row], forward(params, alone, cfg)[0, -13:], 1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_that_are_taken_back_leave_no_trace(name):
    cfg, params = make(name)
    tokens, dropped = random_tokens(3, 30), torch.tensor([4, 1, 2])
    _, cache = prefill(params, tokens[:, :20], init_cache(cfg, 3, 20, F64), cfg, Engine())
    cache = trim(cache, dropped)
    assert cache.length == 19 and cache.counts.tolist() == [16, 19, 18]
    x, cache = advance(params, tokens[:, 20:], cache, cfg, Engine())
    found = logits_of(params, x, cfg, Engine())
    for row, gone in enumerate(dropped.tolist()):
        kept = torch.cat((tokens[row, : 20 - gone], tokens[row, 20:]))[None]
        close(found[row], forward(params, kept, cfg)[0, -10:], 1e-10)


def test_half_precision_in_pieces_is_as_near_as_its_rounding():
    cfg, params = make("latent", torch.bfloat16)
    tokens = random_tokens(2, 40)
    found = in_pieces(params, tokens, cfg, 5, 3, 35, Noted())
    close(found.float(), forward(params, tokens, cfg)[:, 4:].float(), 5e-2)


def test_a_layer_keeps_its_latents_and_the_keys_of_its_own_indexer_alone():
    cfg = tiny(**GLM5)
    expected = [{"latent": 18 * 2, "index": 9 * 2} if kind == "full" else {"latent": 18 * 2} for kind in cfg.indexers]
    assert bytes_of_token(cfg, torch.bfloat16) == expected
    assert bytes_of_token(tiny(**LATENT), F64) == [{"latent": 18 * 8}] * 2
    assert bytes_of_token(tiny(), torch.float32) == [{"k": 3 * 8 * 4, "v": 3 * 8 * 4}] * 2
