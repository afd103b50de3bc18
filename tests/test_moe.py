"""The mixture of experts against slow loops, its gradients included, and against the modules of transformers."""

from functools import partial

import pytest
import torch
from tiny import distance, random_tensor
from transformers import Glm4MoeConfig, GlmMoeDsaConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

from glm5fn import flatten, unflatten, value_and_grad
from glm5fn.kernels import REFERENCE, TORCH, WIDENED
from glm5fn.kernels.experts import Grouped, sort_experts
from glm5fn.moe import load, moe, route

F64 = torch.float64
GROUPED = TORCH._replace(experts=partial(sort_experts, Grouped.apply))  # what a GPU takes in bf16, and a CPU in fp32
ROUTES = {
    "plain": (7, 3, {}),
    "scaled": (7, 2, {"scale": 2.5}),
    "not normed": (7, 3, {"norm_topk": False, "scale": 1.5}),
    "groups": (8, 3, {"groups": 4, "kept_groups": 2}),
    "two groups": (10, 4, {"groups": 2, "kept_groups": 1, "scale": 0.5}),
    "all groups kept": (8, 3, {"groups": 2, "kept_groups": 2}),
}
EACH_ROUTE = pytest.mark.parametrize("experts, topk, settings", ROUTES.values(), ids=ROUTES)


def layer(experts=7, dim=10, ffn=6, shared=9, dtype=F64, seed=0):
    sizes = {
        "router": (experts, dim),
        "router_bias": (experts,),
        "experts.gate_up": (experts, 2, ffn, dim),
        "experts.down": (experts, dim, ffn),
    }
    sizes |= {"shared.gate_up": (2, shared, dim), "shared.down": (dim, shared)} if shared else {}
    generator = torch.Generator().manual_seed(seed)
    return unflatten({path: random_tensor(size, generator, dtype) for path, size in sizes.items()})


def randn(*size, seed=3, dtype=F64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def slow_route(params, token, topk, groups=1, kept_groups=1, norm_topk=True, scale=1.0):
    """One token's [(expert, weight)], best first."""
    scores = [1 / (1 + (-(row @ token)).exp()) for row in params["router"]]
    ranks = [
        float(score.detach()) + float(bias.detach()) for score, bias in zip(scores, params["router_bias"], strict=True)
    ]
    size = len(ranks) // groups
    tops = [sum(sorted(ranks[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-tops[g], g))[:kept_groups]
    open_ = [e for e in range(len(ranks)) if e // size in kept]
    chosen = sorted(open_, key=lambda e: (-ranks[e], e))[:topk]
    total = sum(scores[e] for e in chosen) + 1e-20 if norm_topk else 1.0
    return [(e, scores[e] / total * scale) for e in chosen]


def slow_mlp(gate_up, down, token):
    gate, up = gate_up[0] @ token, gate_up[1] @ token
    return down @ (gate / (1 + (-gate).exp()) * up)


def slow_moe(params, x, topk, **settings):
    tokens = []
    for token in x.flatten(0, 1):
        y = slow_mlp(params["shared"]["gate_up"], params["shared"]["down"], token) if "shared" in params else 0.0
        for e, weight in slow_route(params, token, topk, **settings):
            y = y + weight * slow_mlp(params["experts"]["gate_up"][e], params["experts"]["down"][e], token)
        tokens.append(y)
    return torch.stack(tokens).view_as(x)


def grads_of(block, params, x, topk, slope, **settings):
    """Output and gradients, that of x included."""

    def value(leaves):
        y = block(leaves["params"], leaves["x"], topk, **settings)
        return (y * slope).sum(), y.detach()

    (_, y), grads = value_and_grad(value)({"params": params, "x": x})
    return {"y": y, **grads}


@EACH_ROUTE
def test_route_equals_a_loop(experts, topk, settings):
    params, x = layer(experts), randn(2, 5, 10)
    routing = route(params, x, topk, **settings)
    for b in range(2):
        for s in range(5):
            chosen, weights = zip(*slow_route(params, x[b, s], topk, **settings), strict=True)
            assert routing.chosen[b, s].tolist() == list(chosen)
            torch.testing.assert_close(routing.weights[b, s], torch.stack(weights), rtol=1e-10, atol=0)
            torch.testing.assert_close(routing.logits[b, s], params["router"] @ x[b, s], rtol=1e-10, atol=1e-12)
    assert torch.equal(routing.scores, routing.logits.sigmoid())


@pytest.mark.parametrize("kernels", [REFERENCE, TORCH, WIDENED], ids=["reference", "torch", "widened"])
@EACH_ROUTE
def test_the_block_and_its_gradients_equal_a_loop_over_tokens(experts, topk, settings, kernels):
    params, x, slope = layer(experts), randn(2, 5, 10), randn(2, 5, 10, seed=4)
    ours = grads_of(moe, params, x, topk, slope, kernels=kernels, **settings)
    assert distance(ours, grads_of(slow_moe, params, x, topk, slope, **settings)) < 1e-10


@pytest.mark.parametrize("tokens, experts, topk", [(0, 7, 2), (1, 7, 3), (5, 19, 2), (40, 7, 4)])
@pytest.mark.parametrize("kernels", [TORCH, GROUPED], ids=["loop", "grouped_mm"])
def test_in_fp32_each_way_through_the_experts_equals_the_slow_one(tokens, experts, topk, kernels):
    params, x = layer(experts, dim=12, ffn=8, dtype=torch.float32), randn(1, tokens, 12, dtype=torch.float32)
    slope = randn(1, tokens, 12, seed=4, dtype=torch.float32)
    results = [grads_of(moe, params, x, topk, slope, kernels=k) for k in (kernels, REFERENCE)]
    assert distance(*results) < 1e-5


def test_an_expert_without_tokens_has_gradients_of_zero():
    params, x = layer(19), randn(1, 4, 10)
    grads = grads_of(moe, params, x, 2, torch.ones_like(x))
    idle = load(route(params, x, 2).chosen, 19) == 0
    assert idle.any() and not idle.all()
    for name in ("gate_up", "down"):
        used = grads["params"]["experts"][name].flatten(1).any(1)
        assert torch.equal(used, ~idle)


def test_of_equal_scores_the_lower_experts_and_groups_are_chosen():
    params, x = layer(8), randn(2, 5, 10)
    flat = params | {"router": torch.zeros(8, 10, dtype=F64), "router_bias": torch.zeros(8, dtype=F64)}
    assert (route(flat, x, 3).chosen == torch.arange(3)).all()
    assert (route(flat, x, 3, groups=4, kept_groups=2).chosen == torch.arange(3)).all()
    lifted = flat | {"router_bias": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=F64)}
    assert (route(lifted, x, 2, groups=4, kept_groups=1).chosen == torch.tensor([4, 5])).all()
    many = {"router": torch.zeros(300, 10, dtype=F64), "router_bias": (torch.arange(300) % 2).to(F64)}
    assert (route(many, x, 99).chosen == 2 * torch.arange(99) + 1).all()


def test_a_closed_group_stays_closed_where_all_scores_with_bias_are_below_zero():
    params, x, limits = layer(8), randn(2, 5, 10), {"groups": 4, "kept_groups": 2}
    lowered = params | {"router_bias": params["router_bias"] - 9}
    assert torch.equal(route(lowered, x, 3, **limits).chosen, route(params, x, 3, **limits).chosen)


def test_the_bias_moves_the_choice_but_no_weight():
    params, x = layer(), randn(2, 5, 10)
    moved = params | {"router_bias": params["router_bias"] + torch.arange(7, dtype=F64)}
    one, two = (route(p, x, 2, norm_topk=False) for p in (params, moved))
    assert not torch.equal(one.chosen, two.chosen)
    assert torch.equal(two.weights, two.scores.gather(-1, two.chosen))
    even = params | {"router_bias": params["router_bias"] + 3}
    assert torch.equal(route(even, x, 2).weights, route(params, x, 2).weights)


def test_the_bias_has_no_gradient_and_the_router_has_one():
    params, x = layer(), randn(2, 5, 10)
    grads = grads_of(moe, params, x, 3, randn(2, 5, 10, seed=4))["params"]
    assert not grads["router_bias"].any() and grads["router"].any()


def test_the_router_works_in_fp32_whatever_x_is():
    params, x = layer(dtype=torch.bfloat16), randn(2, 5, 10, dtype=torch.bfloat16)
    routing = route(params, x, 3)
    exact = route({name: params[name].float() for name in ("router", "router_bias")}, x.float(), 3)
    assert all(torch.equal(part, wide) for part, wide in zip(routing, exact, strict=True))


def test_a_given_routing_is_used_instead():
    params, x = layer(), randn(2, 5, 10)
    routing = route(params, x, 3, scale=2.0)
    assert torch.equal(moe(params, x, 3, routing=routing), moe(params, x, 3, scale=2.0))


def test_a_token_alone_gives_what_it_gives_among_others():
    params, x = layer(dtype=torch.float32), randn(3, 5, 10, dtype=torch.float32)
    together = moe(params, x, 3)
    for b in range(3):
        for s in range(5):
            alone = moe(params, x[b : b + 1, s : s + 1], 3)
            torch.testing.assert_close(alone[0, 0], together[b, s], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernels", [TORCH, GROUPED], ids=["loop", "grouped_mm"])
def test_two_threads_give_the_same_bits_twice(two_threads, kernels):
    params = layer(dim=64, ffn=24, dtype=torch.float32)
    x, slope = (randn(4, 512, 64, seed=seed, dtype=torch.float32) for seed in (3, 4))
    first, *others = (flatten(grads_of(moe, params, x, 3, slope, kernels=kernels)) for _ in range(5))
    for other in others:
        assert all(torch.equal(leaf, other[path]) for path, leaf in first.items())


@pytest.mark.parametrize("dim, ffn", [(12, 8), (10, 6)], ids=["aligned", "unaligned"])
def test_the_compiled_block_is_one_graph_and_equals_eager(dim, ffn):
    torch._dynamo.reset()
    params, x = layer(dim=dim, ffn=ffn, dtype=torch.float32), randn(2, 5, dim, dtype=torch.float32)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    slope = torch.ones_like(x)
    results = [grads_of(block, params, x, 3, slope) for block in (compiled, moe)]
    assert distance(*results) < 1e-5


def test_functional_gradients_equal_value_and_grad():
    params, x = layer(), randn(2, 5, 10)

    def value(params):
        y = moe(params, x, 3)
        return y.square().sum(), y.detach()

    grads, (total, _) = torch.func.grad_and_value(value, has_aux=True)(params)
    (wanted, _), tree = value_and_grad(value)(params)
    assert distance({"value": total, **grads}, {"value": wanted, **tree}) == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_row_by_vmap_equal_those_taken_one_by_one():
    params, x = layer(), randn(3, 5, 10)

    def grads(row):
        return torch.func.grad(lambda p: moe(p, row[None], 3).square().sum())(params)

    each = flatten(torch.func.vmap(grads)(x))
    for i in range(3):
        assert distance({path: leaf[i] for path, leaf in each.items()}, flatten(grads(x[i]))) < 1e-10


def test_recomputation_changes_no_bit():
    def again(params, x, topk):
        return torch.utils.checkpoint.checkpoint(moe, params, x, topk, use_reentrant=False)

    params, x, slope = layer(dtype=torch.float32), randn(2, 5, 10, dtype=torch.float32), randn(2, 5, 10, seed=4).float()
    assert distance(grads_of(again, params, x, 3, slope), grads_of(moe, params, x, 3, slope)) == 0


def test_the_backward_pass_keeps_little_more_than_one_hidden_row_a_choice():
    params, x = layer(dim=64, ffn=32, shared=0, dtype=torch.float32), randn(1, 256, 64, dtype=torch.float32)
    params = {path: leaf.requires_grad_() for path, leaf in flatten(params).items()}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
        moe(unflatten(params), x, 4)
    own = {leaf.data_ptr() for leaf in params.values()} | {x.data_ptr()}
    held = sum(leaf.numel() for pointer, leaf in kept.items() if pointer not in own)
    assert held <= 256 * 4 * (2 * 32) * 1.2


def test_widened_experts_take_and_give_bf16_and_equal_fp32_on_the_rounded_numbers():
    params, x, slope = layer(dtype=torch.bfloat16), randn(2, 5, 10).bfloat16(), randn(2, 5, 10, seed=4).bfloat16()
    wide = unflatten({path: leaf.float() for path, leaf in flatten(params).items()})
    ours = grads_of(moe, params, x, 3, slope, kernels=WIDENED)
    assert all(leaf.dtype == torch.bfloat16 for leaf in flatten(ours).values())
    assert distance(ours, grads_of(moe, wide, x.float(), 3, slope.float(), kernels=REFERENCE)) < 2**-7


HF = {
    "glm4_moe": (Glm4MoeMoE, Glm4MoeConfig, {}),
    "glm4_moe, groups": (Glm4MoeMoE, Glm4MoeConfig, {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0}),
    "glm4_moe, not normed": (Glm4MoeMoE, Glm4MoeConfig, {"norm_topk_prob": False, "n_shared_experts": 2}),
    "glm_moe_dsa": (GlmMoeDsaMoE, GlmMoeDsaConfig, {"n_shared_experts": 2, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa, not normed": (GlmMoeDsaMoE, GlmMoeDsaConfig, {"norm_topk_prob": False}),
}


@pytest.mark.parametrize("kind, config, changes", HF.values(), ids=HF)
def test_the_block_and_its_gradients_equal_those_of_transformers(kind, config, changes):
    settings = {"hidden_size": 20, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
    cfg = config(**settings | {"n_shared_experts": 1, "routed_scaling_factor": 2.5} | changes)
    params = layer(8, 20, 12, 12 * cfg.n_shared_experts, dtype=torch.float32)
    oracle, shared, up = kind(cfg), params["shared"], params["experts"]["gate_up"]
    theirs = {
        "gate.weight": params["router"],
        "gate.e_score_correction_bias": params["router_bias"],
        "experts.gate_up_proj": up.flatten(1, 2),
        "experts.down_proj": params["experts"]["down"],
        "shared_experts.gate_proj.weight": shared["gate_up"][0],
        "shared_experts.up_proj.weight": shared["gate_up"][1],
        "shared_experts.down_proj.weight": shared["down"],
    }
    oracle.load_state_dict(theirs, strict=True)
    x, slope = randn(2, 9, 20, dtype=torch.float32), randn(2, 9, 20, seed=4, dtype=torch.float32)
    limits = {"groups": cfg.n_group, "kept_groups": cfg.topk_group}
    rest = {"norm_topk": cfg.norm_topk_prob, "scale": cfg.routed_scaling_factor}
    ours = grads_of(moe, params, x, 3, slope, **limits, **rest)
    leaf = x.clone().requires_grad_()
    y = oracle(leaf)
    (y * slope).sum().backward()
    grads, hf = ours["params"], {name: parameter.grad for name, parameter in oracle.named_parameters()}
    wanted = {
        "y": y,
        "x": leaf.grad,
        "router": hf["gate.weight"],
        "gate_up": hf["experts.gate_up_proj"].view_as(up),
        "down": hf["experts.down_proj"],
        "shared": hf["shared_experts.down_proj.weight"],
    }
    got = {"y": ours["y"], "x": ours["x"], "router": grads["router"], **grads["experts"]}
    assert distance(got | {"shared": grads["shared"]["down"]}, wanted) < 1e-5


def test_the_shared_expert_is_not_scaled():
    params, x = layer(), randn(2, 5, 10)
    alone = torch.stack([slow_mlp(*params["shared"].values(), token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(moe(params, x, 3, scale=0.0), alone, rtol=1e-10, atol=1e-12)
