"""The whole model: its parameter rows, and the pure functions over them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .comm import LOCAL, Comm
from .config import ModelConfig
from .ffn import mlp, mlp_specs
from .gqa import attn_gqa, gqa_specs
from .kernels import TORCH, Kernels
from .spec import Param, in_layer, init_region, rows, shape, whole
from .tree import unflatten

Params = Mapping[str, Any]


def block_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The rows of one layer. GLM-4-0414 calls the norm before the MLP `post_attention_layernorm`, as the others do."""

    def norm(key: str) -> Param:
        return Param("embed", init="ones", hf=f"{{layer}}.{key}.weight")

    specs = {"attn_norm": norm("input_layernorm"), "attn": gqa_specs(cfg)}
    if cfg.post_norms:
        specs["attn_post_norm"] = norm("post_self_attn_layernorm")
    specs |= {"ffn_norm": norm("post_attention_layernorm"), "ffn": mlp_specs(cfg)}
    if cfg.post_norms:
        specs["ffn_post_norm"] = norm("post_mlp_layernorm")
    return specs


def model_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The rows of the whole tree, in the model's order. A tied head is the embedding's own leaf."""
    block = block_specs(cfg)
    layers = {str(i): in_layer(block, f"model.layers.{i}") for i in range(cfg.num_hidden_layers)}
    specs = {
        "embed": Param("vocab embed", hf="model.embed_tokens.weight"),
        "layers": layers,
        "norm": Param("embed", init="ones", hf="model.norm.weight"),
    }
    if not cfg.tie_word_embeddings:
        specs["head"] = Param("vocab embed", fan_in="embed", hf="lm_head.weight")
    return specs


def init_params(
    cfg: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Fresh parameters: norms 1, biases 0, the others normal with std `initializer_range`.

    A value depends on the seed, its path and its place alone.
    """
    device, flat = torch.device(device), {}
    for path, row in rows(model_specs(cfg)):
        size = shape(row, cfg.dims)
        if device.type == "meta":
            flat[path] = torch.empty(size, dtype=dtype, device=device)
        else:
            flat[path] = init_region(path, row, size, whole(size), seed, cfg.initializer_range).to(device, dtype)
    return unflatten(flat)


def block(
    params: Params,
    x: Float[Tensor, "b s d"],
    positions: Int[Tensor, "b s"] | None,
    segments: Int[Tensor, "b s"] | None,
    *,
    cfg: ModelConfig,
    kernels: Kernels = TORCH,
) -> Float[Tensor, "b s d"]:
    """One layer on plain local parameters: attention and MLP, each normed before (GLM-4-0414: also after) and added."""

    def norm(x: Tensor, name: str) -> Tensor:
        return kernels.rms_norm(x, params[name], cfg.rms_norm_eps)

    y = attn_gqa(
        params["attn"],
        norm(x, "attn_norm"),
        positions,
        segments,
        rotary_dim=cfg.rotary_dim,
        theta=cfg.rope_theta,
        interleaved=cfg.rope_interleaved,
        eps=cfg.rms_norm_eps,
        kernels=kernels,
    )
    x = x + (norm(y, "attn_post_norm") if cfg.post_norms else y)
    y = mlp(params["ffn"], norm(x, "ffn_norm"), kernels=kernels)
    return x + (norm(y, "ffn_post_norm") if cfg.post_norms else y)


def trunk(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    *,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
    block: Callable[..., Tensor] = block,
    recompute: bool = False,
) -> Float[Tensor, "b s d"]:
    """Token ids -> hidden states after the final norm.

    recompute: keep each layer's input alone, and run the layer again in the backward pass.
    """

    def layer(weights: Params, x: Tensor) -> Tensor:
        return block(comm.fetch(weights), x, positions, segments, cfg=cfg, kernels=kernels)

    if segments is not None and positions is None:
        positions = restart(segments)
    x = F.embedding(tokens, comm.fetch({"embed": params["embed"]})["embed"])
    for i in range(cfg.num_hidden_layers):
        weights = params["layers"][str(i)]
        if recompute and torch.is_grad_enabled():
            x = checkpoint(layer, weights, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = layer(weights, x)
    return kernels.rms_norm(x, comm.fetch({"norm": params["norm"]})["norm"], cfg.rms_norm_eps)


def restart(segments: Int[Tensor, "b s"]) -> Int[Tensor, "b s"]:
    """Positions that start at 0 in each run of equal segment numbers.

    >>> restart(torch.tensor([[1, 1, 2, 2, 2, 0]]))
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    steps = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    fresh = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return steps - torch.where(fresh, steps, 0).cummax(-1).values


def head_weight(params: Params, comm: Comm = LOCAL) -> Float[Tensor, "v d"]:
    """The output projection; a tied one is fetched on its own, so that its gradient is summed in full precision."""
    return comm.fetch({"head": params["head" if "head" in params else "embed"]})["head"]


def forward(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    *,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
    block: Callable[..., Tensor] = block,
    recompute: bool = False,
) -> Float[Tensor, "b s v"]:
    """Token ids -> logits.

    segments: 0 is padding, 1.. are documents; attention stays inside each. positions: 0, 1, ... in each segment when
    absent. block: the layer function, compiled or not.
    """
    x = trunk(params, tokens, cfg, positions, segments, comm=comm, kernels=kernels, block=block, recompute=recompute)
    return kernels.linear(x, head_weight(params, comm))
