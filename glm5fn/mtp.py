"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that look further ahead."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .batch import Prepared, prepare
from .block import Params, block_specs
from .config import ModelConfig
from .model import Engine, head_weight, inputs, mtp_specs, named, outer_specs, trunk


class Depth(NamedTuple):
    """x: the states that predict the token d + 1 places ahead. terms: those of the depth's layer."""

    x: Float[Tensor, "b s d"]
    terms: dict[str, Any]


def depths(
    params: Params,
    x: Float[Tensor, "b s d"],
    cfg: ModelConfig,
    prepared: Prepared,
    engine: Engine,
) -> Iterator[Depth]:
    """The states of each depth of prediction, which starts from those of the depth before: x, normed, for the first.

    Depth d joins the state at t with the embedding of token t + d. Where that is of another document, or behind the
    end, the position does not count, and it stands after all that do, so that none of them attends to it. Depths in
    excess of the weight sets share the only one.
    """
    chosen = None
    for depth, further in enumerate(prepared.further):
        number = depth % cfg.num_nextn_predict_layers
        weights, layer = params["mtp"][str(number)], cfg.num_hidden_layers + number
        here = prepared.where._replace(real=further.real)
        x = joined(params, number, x, further.tokens, cfg, engine)
        x, selected, found = engine.layer(weights, block_specs(cfg, layer), x, here, None, cfg, chosen=chosen)
        if engine.terms.mtp.share_indices and selected is not None:
            chosen = selected.chosen
        x = engine.kernels.rms_norm(x, engine.fetch(weights, mtp_specs(cfg, layer), "norm"), cfg.rms_norm_eps)
        yield Depth(x, named(f"mtp.{number}", found))


def joined(
    params: Params,
    number: int,
    x: Float[Tensor, "b s d"],
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    engine: Engine,
) -> Float[Tensor, "b s d"]:
    """What the layer of a weight set begins with: the states of the depth before, and the tokens further ahead."""
    weights, specs = params["mtp"][str(number)], mtp_specs(cfg, cfg.num_hidden_layers + number)

    def normed(values: Tensor, name: str) -> Tensor:
        return engine.kernels.rms_norm(values, engine.fetch(weights, specs, name), cfg.rms_norm_eps)

    embedded = engine.comm.embed(engine.fetch(params, outer_specs(cfg), "embed"), tokens)
    both = torch.cat((normed(embedded, "embed_norm"), normed(x, "hidden_norm")), -1)
    return engine.kernels.linear(both, engine.fetch(weights, specs, "join"))


def forward_mtp(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    **how: Any,
) -> tuple[Float[Tensor, "b s v"], list[Float[Tensor, "b s v"]]]:
    """Token ids -> the main logits, and those of each depth: at t, depth d predicts the token at t + d + 1.

    Else as `forward`. Logits at the last d positions of a document mean nothing at depth d.
    """
    engine = Engine(**how)
    prepared = prepare(inputs(tokens, positions, segments), cfg.mtp_depths, engine.comm)
    x, _, started = trunk(params, prepared.tokens, cfg, prepared.where, engine, head=True)
    head = head_weight(params, cfg, engine, started)
    main, *further = (
        engine.logits(engine.comm.enter(states), head)
        for states in (x, *(depth.x for depth in depths(params, x, cfg, prepared, engine)))
    )
    return main, further
