"""The whole model: its parameter rows, and the pure functions over them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .batch import Documents, prepare
from .block import Params, Passed, block, block_specs, norm_spec
from .comm import LOCAL, Comm
from .config import ModelConfig
from .dsa import Selected, choose
from .kernels import TORCH, Kernels
from .settings import PLAIN, Terms
from .spec import Param, in_layer, init_region, rows, shape, whole
from .tree import unflatten


def mtp_specs(cfg: ModelConfig, layer: int) -> dict[str, Any]:
    """The rows of one weight set of multi-token prediction; embedding and head are the model's own."""
    return {
        "embed_norm": norm_spec("enorm"),
        "hidden_norm": norm_spec("hnorm"),
        "join": Param("embed two_embeds", fan_in="two_embeds", hf="{layer}.eh_proj.weight", exact=True),
        **block_specs(cfg, layer),
        "norm": norm_spec("shared_head.norm"),
    }


def outer_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The rows outside of the layers. A tied head is the embedding's own leaf."""
    specs = {
        "embed": Param("vocab embed", hf="model.embed_tokens.weight"),
        "norm": Param("embed", init="ones", hf="model.norm.weight"),
    }
    if not cfg.tie_word_embeddings:
        specs["head"] = Param("vocab embed", fan_in="embed", hf="lm_head.weight", exact=True)
    return specs


def model_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The rows of the whole tree, in the model's order."""
    last = cfg.num_hidden_layers
    layers = {str(i): in_layer(block_specs(cfg, i), f"model.layers.{i}") for i in range(last)}
    outer = outer_specs(cfg)
    specs = {"embed": outer.pop("embed"), "layers": layers, **outer}
    if cfg.num_nextn_predict_layers:
        behind = range(last, last + cfg.num_nextn_predict_layers)
        specs["mtp"] = {str(i - last): in_layer(mtp_specs(cfg, i), f"model.layers.{i}") for i in behind}
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
            flat[path] = torch.empty(size, dtype=row.dtype(dtype), device=device)
        else:
            values = init_region(path, row, size, whole(size), seed, cfg.initializer_range)
            flat[path] = values.to(device, row.dtype(dtype))
    return unflatten(flat)


def compiled(dynamic: bool | None = None) -> Callable[..., Passed]:
    """The layer function, compiled: each kind of layer is a graph, and another in evaluation. dynamic: of any size."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(block, dynamic=dynamic)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the layers are run: the exchanges, the kernels, the layer function (compiled or not), the training's terms.

    recompute: keep each layer's input alone, and run the layer again in the backward pass.
    """

    comm: Comm = LOCAL
    kernels: Kernels = TORCH
    block: Callable[..., Passed] = block
    recompute: bool = False
    terms: Terms = PLAIN

    def begin(self, params: Params, specs: Params, name: str) -> Any:
        """Start the exchange of one tensor of the tree."""
        return self.comm.begin({name: params[name]}, {name: specs[name]})

    def fetch(self, params: Params, specs: Params, name: str, started: Any = None) -> Tensor:
        """One tensor of the tree."""
        return self.comm.fetch({name: params[name]}, {name: specs[name]}, started)[name]

    def logits(self, x: Float[Tensor, "*b d"], head: Tensor) -> Float[Tensor, "*b v"]:
        """Those of all token ids, by this rank's rows of the head."""
        return self.comm.logits(self.kernels.linear(x, head))

    def layer(
        self,
        params: Params,
        specs: Params,
        x: Float[Tensor, "b s d"],
        where: Documents,
        selected: Selected | None,
        cfg: ModelConfig,
        ends: bool = True,
        chosen: Int[Tensor, "b s g"] | None = None,
        started: Any = None,
    ) -> Passed:
        """Run one layer on its parameters as they rest. One that will run again selects its keys before, once.

        started: the exchange of its parameters, if it is on its way.
        """
        once = [started]
        settings = {"cfg": cfg, "ends": ends, "terms": self.terms, "comm": self.comm, "kernels": self.kernels}

        def run(params: Params, x: Tensor, selected: Selected | None, chosen: Tensor | None) -> Passed:
            weights = self.comm.fetch(params, specs, once.pop() if once else None)
            return self.block(weights, x, where, selected, chosen, **settings)

        if self.recompute and torch.is_grad_enabled():
            selects = "indexer" in specs["attn"] and x.shape[1] * self.comm.tp * self.comm.split > cfg.index_topk
            if selects and chosen is None and self.terms.indexer.stage != "dense-warmup":
                chosen = self.choose(params, specs, x, where, cfg)
            return checkpoint(run, params, x, selected, chosen, use_reentrant=False, preserve_rng_state=False)
        return run(params, x, selected, chosen)

    @torch.no_grad()
    def choose(
        self, params: Params, specs: Params, x: Float[Tensor, "b s d"], where: Documents, cfg: ModelConfig
    ) -> Int[Tensor, "b s g"]:
        """The keys that a layer with an indexer selects."""
        names = ("q_a", "q_a_norm", "indexer")
        needed = {"attn_norm": specs["attn_norm"], "attn": {name: specs["attn"][name] for name in names}}
        params = self.comm.fetch(params, needed)
        return choose(
            params["attn"],
            self.comm.enter(self.kernels.rms_norm(x, params["attn_norm"], cfg.rms_norm_eps)),
            where.positions,
            where.segments,
            topk=cfg.index_topk,
            rotary=cfg.qk_rope_head_dim,
            theta=cfg.rope_theta,
            eps=cfg.latent_norm_eps,
            comm=self.comm,
            kernels=self.kernels,
        )


class Trunk(NamedTuple):
    """x: hidden states after the final norm. terms: the sums of those of the layers.

    head: the exchange of the output projection, if it is on its way.
    """

    x: Float[Tensor, "b s d"]
    terms: dict[str, Any]
    head: Any


def trunk(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    where: Documents,
    engine: Engine,
    comm_of: Callable[[int], Comm] | None = None,
    head: bool = False,
) -> Trunk:
    """Token ids -> hidden states after the final norm. Each layer's parameters travel while the one before computes.

    comm_of: the exchanges of each layer, if it has its own. head: what `head_weight` needs travels during the last one.
    """
    specs, indexers, layers = outer_specs(cfg), cfg.indexers, params["layers"]
    terms, selected = {}, None
    embed = engine.begin(params, specs, "embed")
    started = engine.comm.begin(layers["0"], block_specs(cfg, 0))
    x = engine.comm.embed(engine.fetch(params, specs, "embed", embed), tokens)
    norm, head_started = None, None
    for i in range(cfg.num_hidden_layers):
        ends = engine.terms.indexer.teacher == "source" or indexers[i + 1 : i + 2] != ("shared",)
        weights, rows, now = layers[str(i)], block_specs(cfg, i), started
        if i + 1 < cfg.num_hidden_layers:
            started = engine.comm.begin(layers[str(i + 1)], block_specs(cfg, i + 1))
        else:
            norm = engine.begin(params, specs, "norm")
            head_started = engine.begin(params, specs, head_name(params)) if head else None
        shared = selected if indexers[i : i + 1] == ("shared",) else None
        own = engine if comm_of is None else replace(engine, comm=comm_of(i))
        x, selected, found = own.layer(weights, rows, x, where, shared, cfg, ends, started=now)
        terms = add(terms, named(f"layers.{i}", found))
    x = engine.kernels.rms_norm(x, engine.fetch(params, specs, "norm", norm), cfg.rms_norm_eps)
    return Trunk(x, terms, head_started)


def named(path: str, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """The terms of the layer at a path, whose `load` is told from that of others by it."""
    return {name: unflatten({path: value}) if name == "load" else value for name, value in found.items()}


def add(terms: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees of sums added up; what only one has stays."""
    total = dict(terms)
    for name, value in more.items():
        if isinstance(value, Mapping):
            total[name] = add(terms.get(name, {}), value)
        else:
            total[name] = terms[name] + value if name in terms else value
    return total


def head_name(params: Params) -> str:
    return "head" if "head" in params else "embed"


def head_weight(params: Params, cfg: ModelConfig, engine: Engine, started: Any = None) -> Float[Tensor, "v d"]:
    """The output projection; a tied one is fetched on its own, so that its gradient is summed in full precision."""
    return engine.fetch(params, outer_specs(cfg), head_name(params), started)


def forward(
    params: Params,
    tokens: Int[Tensor, "b s"],
    cfg: ModelConfig,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    **how: Any,
) -> Float[Tensor, "b s v"]:
    """Token ids -> logits.

    segments: 0 is padding, 1.. are documents; attention stays inside each. positions: 0, 1, ... in each segment when
    absent. how: comm, kernels, block and recompute, see `Engine`. Where ranks share rows, each has the logits of the
    tokens that its blocks compute; those of tp have the same ones, and what each makes of them is a share of a sum.
    """
    engine = Engine(**how)
    prepared = prepare(inputs(tokens, positions, segments), 0, engine.comm)
    x, _, head = trunk(params, prepared.tokens, cfg, prepared.where, engine, head=True)
    return engine.logits(engine.comm.enter(x), head_weight(params, cfg, engine, head))


def inputs(tokens: Tensor, positions: Tensor | None, segments: Tensor | None) -> dict[str, Tensor]:
    """A batch of what is given."""
    found = {"tokens": tokens, "positions": positions, "segments": segments}
    return {name: part for name, part in found.items() if part is not None}
