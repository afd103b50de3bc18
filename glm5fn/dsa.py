"""Sparse attention over latents (DeepSeek-V3.2's DSA): a light indexer selects the keys of each query."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .config import ModelConfig
from .kernels import TORCH, Kernels
from .mla import absorb, expanded, merge, nope_dim, project, query_latent, values
from .ops import rotation, upcast
from .spec import Param

K_NORM_EPS = 1e-6


def indexer_specs(cfg: ModelConfig) -> dict[str, Param]:
    def row(axes: str, key: str, fan_in: str = "", **more: Any) -> Param:
        return Param(axes, fan_in=fan_in, hf=f"{{layer}}.self_attn.indexer.{key}", part="indexer", **more)

    return {
        "q": row("(index_heads index_dim) q_rank", "wq_b.weight", "q_rank"),
        "k": row("index_dim embed", "wk.weight", "embed"),
        "k_norm": row("index_dim", "k_norm.weight", init="ones"),
        "k_norm_bias": row("index_dim", "k_norm.bias", init="zeros"),
        "weights": row("index_heads embed", "weights_proj.weight", "embed", wide=True),
    }


class Index(NamedTuple):
    """What the index scores are made of; see `kernels.reference.index_scores`."""

    q: Float[Tensor, "b s i j"]
    k: Float[Tensor, "b t j"]
    weights: Float[Tensor, "b s i"]


class Selected(NamedTuple):
    """What a layer hands to those after it, which share its keys.

    chosen: the keys of each query, -1 for none; None if each query attends to all that it may. While an indexer is
    taught by several layers, also its index, and the queries and keys of the attentions that it has served so far.
    """

    chosen: Int[Tensor, "b s g"] | None
    index: Index | None = None
    teachers: tuple[tuple[Tensor, Tensor], ...] = ()


class Sparse(NamedTuple):
    """y: of the attention. kl: the loss of the indexer that ended here, if one did, summed over real queries."""

    y: Float[Tensor, "b s d"]
    selected: Selected
    kl: Float[Tensor, ""] | None


def make_index(
    params: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    q_latent: Float[Tensor, "b s q"],
    positions: Int[Tensor, "b s"] | None,
    rotary: int,
    theta: float,
    kernels: Kernels,
) -> Index:
    """The indexer's queries, keys and head weights. RoPE turns adjacent pairs of the first `rotary` dims."""
    cos, sin = rotation(x, positions, rotary, theta)
    q = kernels.linear(q_latent, rearrange(params["q"], "i j q -> (i j) q"))
    q = kernels.rope(rearrange(q, "b s (i j) -> b s i j", j=params["q"].shape[1]), cos, sin, True)
    k = kernels.linear(x, params["k"])
    k = torch.nn.functional.layer_norm(k, k.shape[-1:], params["k_norm"], params["k_norm_bias"], K_NORM_EPS)
    k = kernels.rope(k[:, :, None], cos, sin, True)[:, :, 0]
    return Index(q, k, kernels.linear(upcast(x), upcast(params["weights"])))


def choose(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None,
    segments: Int[Tensor, "b s"] | None,
    *,
    topk: int,
    rotary: int,
    theta: float,
    eps: float,
    kernels: Kernels = TORCH,
) -> Int[Tensor, "b s g"]:
    """The keys that `attn_dsa` would select, by itself. params: q_a, q_a_norm and indexer."""
    index = make_index(params["indexer"], x, query_latent(params, x, eps, kernels), positions, rotary, theta, kernels)
    return kernels.select(*index, segments, topk)


def attn_dsa(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    selected: Selected | None = None,
    *,
    topk: int = 2048,
    theta: float = 1e4,
    eps: float = 1e-6,
    dense: bool = False,
    taught: bool = False,
    ends: bool = True,
    chosen: Int[Tensor, "b s g"] | None = None,
    real: Bool[Tensor, "b s"] | None = None,
    kernels: Kernels = TORCH,
) -> Sparse:
    """Latent attention in which each query attends to the topk keys that an indexer scores highest.

    params: those of `attn_mla`, and with an indexer of its own also indexer.{q [i, j, q], k [j, d], k_norm [j],
    k_norm_bias [j], weights [i, d]}. Without one it takes the keys that were selected by a layer before it.
    Where no query has more than topk keys, and where `dense`, it attends to all.
    taught: the indexer learns from the attention (DeepSeek-V3.2, eq. 3 and 4); its inputs are detached, so nothing
    else does. ends: no later layer teaches it. chosen: its selection, if it is known already.
    real: the queries that count in the loss.
    """
    latents = project(params, x, positions, theta, eps, kernels)
    nope, rank = nope_dim(params), params["kv_a_norm"].shape[0]
    scale = latents.q.shape[-1] ** -0.5
    sparse = x.shape[1] > topk and not dense
    if "indexer" in params:
        index = None
        if taught or (sparse and chosen is None):
            indexer = params["indexer"] if taught else {name: leaf.detach() for name, leaf in params["indexer"].items()}
            inputs = x.detach(), latents.q_latent.detach(), positions
            index = make_index(indexer, *inputs, latents.q.shape[-1] - nope, theta, kernels)
            if sparse and chosen is None:
                chosen = kernels.select(*index, segments, topk)
        selected = Selected(chosen if sparse else None, index if taught else None)
    elif selected is None:
        raise ValueError("this layer has no indexer of its own, so it needs what an earlier layer selected")
    if selected.chosen is None:
        folded, y = None, expanded(params, latents.q, latents.keys, segments, kernels)
    else:
        folded = absorb(params, latents.q)
        mixed = kernels.sparse_attention(folded, latents.keys, selected.chosen, rank, scale)
        y = values(params, mixed, nope)
    kl, index = None, selected.index
    if index is not None:
        folded = absorb(params, latents.q) if folded is None else folded
        selected = selected._replace(teachers=(*selected.teachers, (folded.detach(), latents.keys.detach())))
        if ends:
            kl = kernels.index_loss(selected.teachers, *index, selected.chosen, segments, real, scale)
            selected = Selected(selected.chosen)
    return Sparse(merge(params, y, kernels), selected, kl)
