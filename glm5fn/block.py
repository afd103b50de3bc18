"""One layer of any of the families: its parameter rows, and the function over them."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from .batch import Documents
from .comm import LOCAL, Comm
from .config import ModelConfig
from .dsa import Selected, attn_dsa, indexer_specs
from .ffn import mlp, mlp_specs
from .gqa import attn_gqa, gqa_specs
from .kernels import TORCH, Kernels
from .mla import attn_mla, mla_specs
from .moe import balance_loss, load, moe, moe_specs, route, z_loss
from .settings import PLAIN, RouterConfig, Terms
from .spec import Param

Params = Mapping[str, Any]


def norm_spec(key: str) -> Param:
    return Param("embed", init="ones", hf=f"{{layer}}.{key}.weight")


@cache  # asked for each layer of each token
def block_specs(cfg: ModelConfig, layer: int) -> Mapping[str, Any]:
    """The rows of one layer. GLM-4-0414 calls the norm before the MLP `post_attention_layernorm`, as the others do.

    The layers behind the last one are those of multi-token prediction: each has an indexer of its own.
    """
    attn: dict[str, Any] = {**(mla_specs(cfg) if cfg.attention == "mla" else gqa_specs(cfg))}
    if (*cfg.indexers, *["full"] * cfg.num_nextn_predict_layers)[layer : layer + 1] == ("full",) and cfg.indexers:
        attn["indexer"] = indexer_specs(cfg)
    specs = {"attn_norm": norm_spec("input_layernorm"), "attn": attn}
    if cfg.post_norms:
        specs["attn_post_norm"] = norm_spec("post_self_attn_layernorm")
    ffn = moe_specs(cfg) if cfg.is_moe(layer) else mlp_specs(cfg)
    specs |= {"ffn_norm": norm_spec("post_attention_layernorm"), "ffn": ffn}
    if cfg.post_norms:
        specs["ffn_post_norm"] = norm_spec("post_mlp_layernorm")
    return specs


class Passed(NamedTuple):
    """What a layer passes on. selected: the keys that the next layers may share. terms: its parts of the training loss.

    terms: `kl`, `balance` and `z` [], and `load` [e], the real tokens that each expert got; those that the layer has.
    """

    x: Float[Tensor, "b s d"]
    selected: Selected | None
    terms: dict[str, Tensor]


ANYWHERE = Documents()


def block(
    params: Params,
    x: Float[Tensor, "b s d"],
    where: Documents = ANYWHERE,
    selected: Selected | None = None,
    chosen: Int[Tensor, "b s g"] | None = None,
    *,
    cfg: ModelConfig,
    ends: bool = True,
    terms: Terms = PLAIN,
    comm: Comm = LOCAL,
    kernels: Kernels = TORCH,
) -> Passed:
    """One layer on plain local parameters: attention and MLP, each normed before (GLM-4-0414: also after) and added.

    selected, chosen, ends: see `dsa.attn_dsa`.
    """
    found: dict[str, Tensor] = {}

    def norm(x: Tensor, name: str) -> Tensor:
        return kernels.rms_norm(x, params[name], cfg.rms_norm_eps)

    normed = comm.enter(norm(x, "attn_norm"))
    if cfg.attention == "gqa":
        y = attn_gqa(
            params["attn"],
            normed,
            where.positions,
            where.segments,
            rotary_dim=cfg.rotary_dim,
            theta=cfg.rope_theta,
            interleaved=cfg.rope_interleaved,
            eps=cfg.rms_norm_eps,
            comm=comm,
            kernels=kernels,
        )
    elif cfg.index_topk:
        y, selected, kl = attn_dsa(
            params["attn"],
            normed,
            where.positions,
            where.segments,
            selected,
            topk=cfg.index_topk,
            theta=cfg.rope_theta,
            eps=cfg.latent_norm_eps,
            dense=terms.indexer.stage == "dense-warmup",
            taught=terms.indexer.stage != "frozen" and terms.indexer.coef > 0,
            ends=ends,
            chosen=chosen,
            real=where.real,
            comm=comm,
            kernels=kernels,
        )
        found |= {} if kl is None else {"kl": kl}
    else:
        y = attn_mla(
            params["attn"],
            normed,
            where.positions,
            where.segments,
            theta=cfg.rope_theta,
            eps=cfg.latent_norm_eps,
            comm=comm,
            kernels=kernels,
        )
    y = comm.leave(y)
    x = x + (norm(y, "attn_post_norm") if cfg.post_norms else y)
    normed = norm(x, "ffn_norm")
    if "router" in params["ffn"]:
        y, routed = moe_of(params["ffn"], normed, where, cfg, terms.router, comm, kernels)
        found |= routed
    else:
        y = comm.leave(mlp(params["ffn"], comm.enter(normed), kernels=kernels))
    return Passed(x + (norm(y, "ffn_post_norm") if cfg.post_norms else y), selected, found)


def moe_of(
    params: Params, x: Tensor, where: Documents, cfg: ModelConfig, terms: RouterConfig, comm: Comm, kernels: Kernels
) -> tuple[Tensor, dict[str, Tensor]]:
    """The experts' output, and what the router adds to the training loss and to its own balance."""
    topk, experts = cfg.num_experts_per_tok, cfg.n_routed_experts
    routing = route(
        params,
        x,
        topk,
        groups=cfg.n_group,
        kept_groups=cfg.topk_group,
        norm_topk=cfg.norm_topk_prob,
        scale=cfg.routed_scaling_factor,
    )
    found = {"load": load(routing.chosen, experts, where.real)}
    if terms.balance_coef:
        found["balance"] = balance_loss(routing, where.segments, where.real, comm=comm)
    if terms.z_coef:
        found["z"] = z_loss(routing.logits, where.real)
    return moe(params, x, topk, routing=routing, comm=comm, kernels=kernels), found
