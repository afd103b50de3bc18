"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are rebuilt from one small latent."""

from __future__ import annotations  # those of inner functions would be made anew for each token

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from .comm import LOCAL, Comm, Span, over_spans
from .config import ModelConfig
from .kernels import TORCH, Kernels
from .ops import rotation
from .spec import Param


def mla_specs(cfg: ModelConfig) -> dict[str, Param]:
    def row(axes: str, key: str, fan_in: str) -> Param:
        return Param(axes, fan_in=fan_in, hf=f"{{layer}}.self_attn.{key}.weight")

    def norm(axes: str, key: str) -> Param:
        return Param(axes, init="ones", hf=f"{{layer}}.self_attn.{key}.weight")

    return {
        "q_a": row("q_rank embed", "q_a_proj", "embed"),
        "q_a_norm": norm("q_rank", "q_a_layernorm"),
        "q_b": row("(heads qk_dim) q_rank", "q_b_proj", "q_rank"),
        "kv_a": row("kv_rank_rope embed", "kv_a_proj_with_mqa", "embed"),
        "kv_a_norm": norm("kv_rank", "kv_a_layernorm"),
        "kv_b": row("(heads nope_v_dim) kv_rank", "kv_b_proj", "kv_rank"),
        "o": row("embed (heads v_dim)", "o_proj", "heads v_dim"),
    }


class Latents(NamedTuple):
    """What attention needs of x. q_latent: normed. angles: cosine and sine of the rotation. q: the last r dims rotated.

    keys: the normed latent, which every head rebuilds its keys and values from, then the rotated dims of every key.
    """

    q_latent: Float[Tensor, "b s q"]
    angles: tuple[Float[Tensor, "*b s r/2"], Float[Tensor, "*b s r/2"]]
    q: Float[Tensor, "b s h k"]
    keys: Float[Tensor, "b s c+r"]


def query_latent(
    params: Mapping[str, Tensor], x: Float[Tensor, "b s d"], eps: float, kernels: Kernels
) -> Float[Tensor, "b s q"]:
    return kernels.rms_norm(kernels.linear(x, params["q_a"]), params["q_a_norm"], eps)


def project(
    params: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None,
    theta: float,
    eps: float,
    kernels: Kernels,
) -> Latents:
    rank, heads = params["kv_a_norm"].shape[0], params["q_b"].shape[0]
    rotary = params["kv_a"].shape[0] - rank
    angles = rotation(x, positions, rotary, theta)
    q_latent = query_latent(params, x, eps, kernels)
    q = kernels.linear(q_latent, rearrange(params["q_b"], "h k q -> (h k) q"))
    q = rearrange(q, "b s (h k) -> b s h k", h=heads)
    latent, key = kernels.linear(x, params["kv_a"]).split((rank, rotary), -1)
    latent = kernels.rms_norm(latent, params["kv_a_norm"], eps)
    q_nope, q_rope = q.split((q.shape[-1] - rotary, rotary), -1)
    q = torch.cat((q_nope, kernels.rope(q_rope, *angles, True)), -1)
    key = kernels.rope(key[:, :, None], *angles, True)[:, :, 0]
    return Latents(q_latent, angles, q, torch.cat((latent, key), -1))


def expanded(
    params: Mapping[str, Tensor],
    q: Float[Tensor, "b s h k"],
    keys: Float[Tensor, "b t c+r"],
    segments: Int[Tensor, "b t"] | None,
    spans: Sequence[Span],
    kernels: Kernels,
) -> Float[Tensor, "b s h u"]:
    """Attention over each head's own keys and values, rebuilt from the latents."""
    heads, rank = params["kv_b"].shape[0], params["kv_a_norm"].shape[0]
    latent, key = keys.split((rank, keys.shape[-1] - rank), -1)
    kv = kernels.linear(latent, rearrange(params["kv_b"], "h n c -> (h n) c"))
    kv = rearrange(kv, "b t (h n) -> b t h n", h=heads)
    nope = q.shape[-1] - key.shape[-1]
    k = torch.cat((kv[..., :nope], key[:, :, None].expand(-1, -1, heads, -1)), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Float[Tensor, "b s h u"]:
        q, k, v = (rearrange(part, "b s h k -> b h s k") for part in (q, k, v))
        return rearrange(kernels.attention(q, k, v, segments), "b h s u -> b s h u")

    return over_spans(attend, spans, (q,), (k, kv[..., nope:], segments))


def absorb(params: Mapping[str, Tensor], q: Float[Tensor, "b s h k"]) -> Float[Tensor, "b s h c+r"]:
    """Queries that meet the latents themselves: folded through the rows that rebuild the keys."""
    rotary = params["kv_a"].shape[0] - params["kv_a_norm"].shape[0]
    nope = q.shape[-1] - rotary
    folded = torch.einsum("bshk,hkc->bshc", q[..., :nope], params["kv_b"][:, :nope])
    return torch.cat((folded, q[..., nope:]), -1)


def values(params: Mapping[str, Tensor], mixed: Float[Tensor, "b s h c"], nope: int) -> Float[Tensor, "b s h u"]:
    """The values of mixed latents, which are the mixed values."""
    return torch.einsum("bshc,huc->bshu", mixed, params["kv_b"][:, nope:])


def attend(
    params: Mapping[str, Tensor],
    q: Float[Tensor, "b s h k"],
    keys: Float[Tensor, "b t c+r"],
    segments: Int[Tensor, "b t"] | None,
    spans: Sequence[Span],
    folded: bool,
    kernels: Kernels,
) -> Float[Tensor, "b s h u"]:
    """Attention to all keys; folded: over the latents themselves instead of expanded keys, which is equal."""
    if not folded:
        return expanded(params, q, keys, segments, spans, kernels)
    rank, scale = params["kv_a_norm"].shape[0], q.shape[-1] ** -0.5

    def meet(q: Tensor, keys: Tensor, segments: Tensor | None) -> Float[Tensor, "b s h c"]:
        q, keys = rearrange(q, "b s h c -> b h s c"), keys[:, None]
        return rearrange(kernels.attention(q, keys, keys, segments, scale)[..., :rank], "b h s c -> b s h c")

    mixed = over_spans(meet, spans, (absorb(params, q),), (keys, segments))
    return values(params, mixed, nope_dim(params))


def nope_dim(params: Mapping[str, Tensor]) -> int:
    """How many dims of a head's queries and keys are not rotated."""
    return params["q_b"].shape[1] - params["kv_a"].shape[0] + params["kv_a_norm"].shape[0]


def merge(params: Mapping[str, Tensor], y: Float[Tensor, "b s h u"], kernels: Kernels) -> Float[Tensor, "b s d"]:
    return kernels.linear(rearrange(y, "b s h u -> b s (h u)"), rearrange(params["o"], "d h u -> d (h u)"))


def attn_mla(
    params: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b t"] | None = None,
    *,
    theta: float = 1e4,
    eps: float = 1e-6,
    absorbed: bool | None = None,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
) -> Float[Tensor, "b s d"]:
    """Causal attention whose keys and values come from one latent of c dims for all heads, and r rotated dims.

    params: q_a [q, d], q_a_norm [q], q_b [h, k, q], kv_a [c+r, d], kv_a_norm [c], kv_b [h, k-r+u, c] (key rows, then
    value rows), o [d, h, u]. RoPE turns adjacent pairs of the last r dims of queries and keys; the scale is k^-0.5.
    positions: of each token for RoPE, 0, 1, ... when absent. segments: a token attends inside its own only.
    eps: of the norms of both latents. absorbed: attend over the latents themselves instead of expanded keys, which is
    equal; by default where keys are kept.
    """
    latents = project(params, x, positions, theta, eps, kernels)
    (keys,), spans = comm.gather(latents.keys), comm.spans(x.shape[1])
    folded = comm.past is not None if absorbed is None else absorbed
    return merge(params, attend(params, latents.q, keys, segments, spans, folded, kernels), kernels)
