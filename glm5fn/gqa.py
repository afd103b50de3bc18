"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) of the GLM-4 families."""

from __future__ import annotations  # those of inner functions would be made anew for each token

from collections.abc import Mapping

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from .comm import LOCAL, Comm, over_spans
from .config import ModelConfig
from .kernels import TORCH, Kernels
from .ops import rotation
from .spec import Param


def gqa_specs(cfg: ModelConfig) -> dict[str, Param]:
    specs = {
        "q": Param("(heads head_dim) embed", fan_in="embed", hf="{layer}.self_attn.q_proj.weight"),
        "k": Param("(kv_heads head_dim) embed", fan_in="embed", hf="{layer}.self_attn.k_proj.weight"),
        "v": Param("(kv_heads head_dim) embed", fan_in="embed", hf="{layer}.self_attn.v_proj.weight"),
        "o": Param("embed (heads head_dim)", fan_in="heads head_dim", hf="{layer}.self_attn.o_proj.weight"),
    }
    if cfg.attention_bias:
        specs |= {
            "q_bias": Param("(heads head_dim)", init="zeros", hf="{layer}.self_attn.q_proj.bias"),
            "k_bias": Param("(kv_heads head_dim)", init="zeros", hf="{layer}.self_attn.k_proj.bias"),
            "v_bias": Param("(kv_heads head_dim)", init="zeros", hf="{layer}.self_attn.v_proj.bias"),
        }
    if cfg.use_qk_norm:
        specs |= {
            "q_norm": Param("head_dim", init="ones", hf="{layer}.self_attn.q_norm.weight"),
            "k_norm": Param("head_dim", init="ones", hf="{layer}.self_attn.k_norm.weight"),
        }
    return specs


def attn_gqa(
    params: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b t"] | None = None,
    *,
    rotary_dim: int | None = None,
    theta: float = 1e4,
    interleaved: bool = True,
    eps: float = 1e-6,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
) -> Float[Tensor, "b s d"]:
    """Causal attention with fewer key and value heads than query heads.

    params: q [h, k, d], k and v [n, k, d], o [d, h, k]; optionally q_bias, k_bias, v_bias, and q_norm, k_norm [k],
    which norm each head before the rotation. h must be a multiple of n.
    positions: of each token for RoPE, 0, 1, ... when absent. segments: a token attends inside its own only.
    rotary_dim: how many dims of a head RoPE turns, all when absent.
    """
    head_dim = params["q"].shape[1]

    def project(name: str) -> Float[Tensor, "b s h k"]:
        weight, bias = params[name], params.get(f"{name}_bias")
        bias = None if bias is None else rearrange(bias, "h k -> (h k)")
        y = kernels.linear(x, rearrange(weight, "h k d -> (h k) d"), bias)
        return rearrange(y, "b s (h k) -> b s h k", k=head_dim)

    q, k, v = project("q"), project("k"), project("v")
    if "q_norm" in params:
        q, k = kernels.rms_norm(q, params["q_norm"], eps), kernels.rms_norm(k, params["k_norm"], eps)
    cos, sin = rotation(x, positions, head_dim if rotary_dim is None else rotary_dim, theta)
    q, k = kernels.rope(q, cos, sin, interleaved), kernels.rope(k, cos, sin, interleaved)
    k, v = comm.gather(k, v)

    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Float[Tensor, "b s (h u)"]:
        q, k, v = (rearrange(part, "b s h k -> b h s k") for part in (q, k, v))
        return rearrange(kernels.attention(q, k, v, segments), "b h s u -> b s (h u)")

    y = over_spans(attend, comm.spans(x.shape[1]), (q,), (k, v, segments))
    return kernels.linear(y, rearrange(params["o"], "d h u -> d (h u)"))
