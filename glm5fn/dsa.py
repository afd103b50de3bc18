"""Sparse attention over latents (DeepSeek-V3.2's DSA): a light indexer selects the keys of each query."""

from __future__ import annotations  # those of inner functions would be made anew for each token

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .comm import LOCAL, Comm, Span, over_spans
from .config import ModelConfig
from .kernels import TORCH, Kernels
from .mla import absorb, attend, merge, nope_dim, project, query_latent, values
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
    angles: tuple[Tensor, Tensor],
    kernels: Kernels,
) -> Index:
    """The indexer's queries, keys and head weights. RoPE turns adjacent pairs of the first dims, by these angles."""
    q = kernels.linear(q_latent, rearrange(params["q"], "i j q -> (i j) q"))
    q = kernels.rope(rearrange(q, "b s (i j) -> b s i j", j=params["q"].shape[1]), *angles, True)
    k = kernels.linear(x, params["k"])
    k = F.layer_norm(k, k.shape[-1:], params["k_norm"], params["k_norm_bias"], K_NORM_EPS)
    k = kernels.rope(k[:, :, None], *angles, True)[:, :, 0]
    return Index(q, k, kernels.linear(upcast(x), upcast(params["weights"])))


def choose(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None,
    segments: Int[Tensor, "b t"] | None,
    *,
    topk: int,
    rotary: int,
    theta: float,
    eps: float,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
) -> Int[Tensor, "b s g"]:
    """The keys that `attn_dsa` would select, by itself. params: q_a, q_a_norm and indexer."""
    angles = rotation(x, positions, rotary, theta)
    index = make_index(params["indexer"], x, query_latent(params, x, eps, kernels), angles, kernels)
    (keys,) = comm.gather(index.k)
    return select(index._replace(k=keys), segments, topk, comm.spans(x.shape[1]), kernels)


def select(
    index: Index, segments: Int[Tensor, "b t"] | None, topk: int, spans: Sequence[Span], kernels: Kernels
) -> Int[Tensor, "b s g"]:
    """The keys of each query, among all."""

    def selected(q: Tensor, weights: Tensor, k: Tensor, segments: Tensor | None) -> Int[Tensor, "b s g"]:
        chosen = kernels.select(q, k, weights, segments, topk)
        fewer = topk - chosen.shape[-1]
        return F.pad(chosen, (0, fewer), value=-1) if fewer else chosen

    return over_spans(selected, spans, (index.q, index.weights), (index.k, segments))


def attn_dsa(
    params: Mapping[str, Any],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b t"] | None = None,
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
    comm: Comm = LOCAL,
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
    spans, total = comm.spans(x.shape[1]), (comm.past or 0) + x.shape[1] * comm.split
    sparse = total > topk and not dense
    keys, index = latents.keys, None
    if "indexer" in params:
        if taught or (sparse and chosen is None) or comm.past is not None:
            indexer = params["indexer"] if taught else {name: leaf.detach() for name, leaf in params["indexer"].items()}
            index = make_index(indexer, x.detach(), latents.q_latent.detach(), latents.angles, kernels)
            keys, index_keys = comm.gather(keys, index.k)
            index = index._replace(k=index_keys)
            if sparse and chosen is None:
                chosen = select(index, segments, topk, spans, kernels)
        selected = Selected(chosen if sparse else None, index if taught else None)
    elif selected is None:
        raise ValueError("this layer has no indexer of its own, so it needs what an earlier layer selected")
    if index is None:
        (keys,) = comm.gather(keys)
    if selected.chosen is None:
        folded, y = None, attend(params, latents.q, keys, segments, spans, comm.past is not None, kernels)
    else:
        folded = absorb(params, latents.q)

        def attend_chosen(q: Tensor, chosen: Tensor, keys: Tensor) -> Float[Tensor, "b s h c"]:
            return kernels.sparse_attention(q, keys, chosen, rank, scale)

        y = values(params, over_spans(attend_chosen, spans, (folded, selected.chosen), (keys,)), nope)
    kl, index = None, selected.index
    if index is not None:
        folded = absorb(params, latents.q) if folded is None else folded
        teacher = comm.all_heads(folded.detach()), keys.detach()
        selected = selected._replace(teachers=(*selected.teachers, teacher))
        if ends:
            index = index._replace(q=comm.own(index.q), weights=comm.own(index.weights))
            chosen = None if selected.chosen is None else comm.own(selected.chosen)
            own = comm.own_spans(x.shape[1])
            kl = index_loss(selected.teachers, index, chosen, segments, real, scale, own, kernels)
            selected = Selected(selected.chosen)
    return Sparse(merge(params, y, kernels), selected, kl)


def index_loss(
    teachers: Sequence[tuple[Tensor, Tensor]],
    index: Index,
    chosen: Int[Tensor, "b s g"] | None,
    segments: Int[Tensor, "b t"] | None,
    real: Bool[Tensor, "b s"] | None,
    scale: float,
    spans: Sequence[Span],
    kernels: Kernels,
) -> Float[Tensor, ""]:
    """What an indexer learns from its teachers, summed over this rank's real queries."""
    queries, keys = zip(*teachers, strict=True)
    count = len(queries)

    def summed(q: Tensor, weights: Tensor, chosen: Tensor | None, real: Tensor | None, *rest: Tensor) -> Tensor:
        (*queries, k, segments), keys = rest[: count + 2], rest[count + 2 :]
        return kernels.index_loss(list(zip(queries, keys, strict=True)), q, k, weights, chosen, segments, real, scale)

    own = (index.q, index.weights, chosen, real, *queries)
    return over_spans(summed, spans, own, (index.k, segments, *keys))
