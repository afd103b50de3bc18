"""The mixture of experts: routing, the block, and what keeps loads even (DeepSeek-V3, arXiv 2412.19437)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .comm import LOCAL, Comm
from .config import ModelConfig
from .ffn import mlp
from .kernels import TORCH, Kernels
from .ops import upcast
from .spec import Param

TINY = 1e-20  # keeps a sum of scores from being 0, as in DeepSeek-V3's code


def moe_specs(cfg: ModelConfig) -> dict[str, Any]:
    def row(axes: str, key: str | tuple[str, ...], fan_in: str, exact: bool = False) -> Param:
        keys = (key,) if isinstance(key, str) else key
        keys = tuple(f"{{layer}}.mlp.{key}.weight" for key in keys)
        return Param(axes, fan_in=fan_in, hf=keys[0] if len(keys) == 1 else keys, exact=exact)

    specs = {
        "router": row("route embed", "gate", "embed", exact=True),
        "router_bias": Param(
            "route", init="zeros", part="state", wide=True, hf="{layer}.mlp.gate.e_score_correction_bias"
        ),
        "experts": {
            "gate_up": row("expert pair expert_ffn embed", ("experts.{e}.gate_proj", "experts.{e}.up_proj"), "embed"),
            "down": row("expert embed expert_ffn", "experts.{e}.down_proj", "expert_ffn"),
        },
    }
    if cfg.n_shared_experts:
        specs["shared"] = {
            "gate_up": row("pair shared_ffn embed", ("shared_experts.gate_proj", "shared_experts.up_proj"), "embed"),
            "down": row("embed shared_ffn", "shared_experts.down_proj", "shared_ffn"),
        }
    return specs


class Routing(NamedTuple):
    """logits and scores (their sigmoids) of all experts, those chosen, best first, and their mixing weights."""

    logits: Float[Tensor, "b s e"]
    scores: Float[Tensor, "b s e"]
    chosen: Int[Tensor, "b s a"]
    weights: Float[Tensor, "b s a"]


def best(scores: Float[Tensor, "*b n"], count: int) -> Int[Tensor, "*b a"]:
    """The indices of the highest scores, highest first; of equals the lower index first, which topk leaves open."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count]


def route(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    topk: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    norm_topk: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose each token's experts by score + bias, and weigh them by score alone, all in at least fp32 (eq. 12-16).

    params: router [e, d] and router_bias [e].
    groups: the experts fall into so many, and only the kept_groups best of a token are open to it; a group counts as
    much as its two best experts. norm_topk: divide the weights by their sum. scale: multiply them.
    """
    logits = F.linear(upcast(x), upcast(params["router"]))
    scores = logits.sigmoid()
    ranks = (scores + params["router_bias"]).detach()
    if kept_groups < groups:
        grouped = rearrange(ranks, "b s (group e) -> b s group e", group=groups)
        kept = best(grouped.topk(2, -1).values.sum(-1), kept_groups)
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        ranks = rearrange(grouped.masked_fill(closed[..., None], -math.inf), "b s group e -> b s (group e)")
    chosen = best(ranks, topk)
    weights = scores.gather(-1, chosen)
    if norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return Routing(logits, scores, chosen, weights * scale)


def moe(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    topk: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    norm_topk: bool = True,
    scale: float = 1.0,
    routing: Routing | None = None,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
) -> Float[Tensor, "b s d"]:
    """The weighted sum of each token's chosen experts, plus the shared expert if there is one.

    params: those of `route`; experts: gate_up [e, 2, f, d], gate first, and down [e, d, f]; optionally shared, as of
    `mlp`. routing: what `route` gave, when the caller has it already.
    """
    if routing is None:
        routing = route(params, x, topk, groups=groups, kept_groups=kept_groups, norm_topk=norm_topk, scale=scale)
    chosen, weights = routing.chosen.flatten(0, 1), routing.weights.flatten(0, 1)
    experts = params["experts"]
    inputs = x.flatten(0, 1), chosen, weights, experts["gate_up"], experts["down"]
    y = comm.experts(kernels.experts, *inputs).view_as(x)
    return y + comm.leave(mlp(params["shared"], comm.enter(x), kernels=kernels)) if "shared" in params else y


def load(chosen: Int[Tensor, "b s a"], experts: int, real: Bool[Tensor, "b s"] | None = None) -> Int[Tensor, "e"]:
    """How many tokens chose each expert, exactly. real: which tokens count, all when absent."""
    ones = torch.ones_like(chosen) if real is None else real[..., None].expand_as(chosen).to(chosen.dtype)
    return chosen.new_zeros(experts).scatter_add(0, chosen.flatten(), ones.flatten())


def balanced(bias: Float[Tensor, "e"], load: Int[Tensor, "e"], rate: float) -> Float[Tensor, "e"]:
    """The next bias: up by rate where an expert got less than the mean load, down where more (section 2.1.2).

    >>> balanced(torch.zeros(3), torch.tensor([1, 5, 3]), 0.5)
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    return bias + rate * torch.sign(load.sum() - load * len(load)).to(bias.dtype)


def balance_loss(
    routing: Routing,
    documents: Int[Tensor, "b t"] | None = None,
    real: Bool[Tensor, "b s"] | None = None,
    *,
    comm: Comm = LOCAL,
) -> Float[Tensor, ""]:
    """The sequence-wise balance loss of each document, summed over documents (eq. 17-20, without alpha).

    As in the paper, an expert's frequency counts the tokens of which it is among the highest scores: the bias and
    the groups have no part in it. documents: a new one begins where the number changes (`segments` will do); a row is
    one when absent. real: which tokens count, all when absent. Ranks that share rows have an equal part of the sum.
    """
    scores, topk = routing.scores, routing.chosen.shape[-1]
    kept = torch.ones_like(scores[..., :1]) if real is None else real[..., None].type_as(scores)
    scores, kept = comm.gather(comm.enter(scores), comm.enter(kept))
    rows, steps, experts = scores.shape
    picked = torch.zeros_like(scores).scatter(-1, best(scores, topk), 1.0) * kept
    shares = scores / (scores.sum(-1, keepdim=True) + TINY) * kept
    first = torch.arange(0, rows * steps, max(steps, 1), device=scores.device)[:, None]
    if documents is not None:
        fresh = documents[:, 1:] != documents[:, :-1]
        first = first + F.pad(fresh, (1, 0)).cumsum(-1)
    bins = first.expand(rows, steps).flatten()

    def summed(values: Float[Tensor, "b s n"]) -> Float[Tensor, "documents n"]:
        return values.new_zeros(rows * steps, values.shape[-1]).index_add(0, bins, values.flatten(0, 1))

    tokens = summed(kept)[:, 0].clamp(min=1)
    losses = (summed(picked) * summed(shares)).sum(-1) * experts / (topk * tokens.square())
    return losses.sum() / (comm.split * comm.tp)


def z_loss(logits: Float[Tensor, "b s e"], real: Bool[Tensor, "b s"] | None = None) -> Float[Tensor, ""]:
    """The sum over real tokens of logsumexp(logits) squared (ST-MoE, arXiv 2202.08906, eq. 5, times the tokens)."""
    squares = logits.logsumexp(-1).square()
    return squares.sum() if real is None else squares.masked_fill(~real, 0.0).sum()
