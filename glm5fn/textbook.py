"""What the ranks of tp exchange in a step, counted from sizes alone."""

from collections import Counter

import torch

from .collectives import pieces_of
from .model import model_specs
from .run import compute_dtype
from .settings import RunConfig
from .spec import cut, rows, shape, split_dims

FP32, INT64 = torch.float32.itemsize, torch.int64.itemsize


def textbook(run: RunConfig) -> dict[str, int]:
    """The bytes of each kind of exchange; without the all-to-all of what indexers learn from, and balance losses.

    Of runs that train the model, that is: while indexers alone learn, nothing but they has a backward pass.

    What enters a branch is gathered and what leaves it scattered, in the backward pass the other way round (sequence
    parallelism: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2; here what has entered is kept, not gathered
    again). So are the states before the head, and those behind the embedding. The loss needs a maximum and two sums of
    each token, and the gradients of what all ranks have alike are summed. A layer that runs again exchanges again what
    it does forward, but for what leaves it last if nothing comes behind, and gathers once more where it selects its
    keys before.
    """
    cfg, mesh, data, depths = run.model, run.mesh, run.data, run.mtp_depths
    batches = data.global_batch // (mesh.data_ranks * data.micro_batch)
    missing = -data.seq_len % pieces_of(mesh)
    tokens = data.micro_batch * (data.seq_len + missing) // mesh.cp
    layers = [*range(cfg.num_hidden_layers), *[cfg.num_hidden_layers] * depths]
    inside = sum(map(cfg.is_moe, layers)) * (mesh.tp_experts == "ffn")  # whose experts all ranks have a part of
    without = 0 if cfg.n_shared_experts else sum(map(cfg.is_moe, layers))
    branches, again = 2 * len(layers) - without + inside, run.recompute == "layer"
    moves = branches * (2 + again) + 2 * (1 + depths)
    selects = again and 0 < cfg.index_topk < data.seq_len and run.indexer.stage != "dense-warmup"
    selected = selects * (cfg.indexers.count("full") + depths)
    last = again * (not cfg.post_norms) * (len(layers) - without * (not inside))
    stream = tokens * cfg.hidden_size * compute_dtype(run).itemsize
    routes = inside * tokens * cfg.num_experts_per_tok
    return {
        "all-gather": batches * ((moves + selected) * stream + (1 + again) * routes * (INT64 + FP32)),
        "reduce-scatter": batches * ((moves - last) * stream + routes * FP32),
        "all-reduce": batches * FP32 * (3 * (1 + depths) * tokens + alike(run)),
    }


def alike(run: RunConfig) -> int:
    """Of how many gradients all ranks of tp have a share, each time that a part of the model is used."""
    cfg, total = run.model, 0
    uses = Counter(f"mtp.{depth % cfg.num_nextn_predict_layers}" for depth in range(run.mtp_depths))
    for path, row in rows(model_specs(cfg)):
        mesh = run.mesh.expert if row.of_experts else run.mesh.dense
        dims = split_dims(row, tuple(mesh), run.layout.store)
        if mesh["tp"] > 1 and "tp" not in dims:
            ranks, count = {dim: mesh[axis] for axis, dim in dims.items()}, 1
            for dim, n in enumerate(shape(row, cfg.dims)):
                count *= cut(n, ranks.get(dim, 1), 0)[1]
            total += count * (uses[".".join(path.split(".")[:2])] if path.startswith("mtp.") else 1)
    return total
