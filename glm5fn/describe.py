"""What a model's directory holds, told from its headers; and the checksum of all that its files hold."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from threading import Event

from .config import ModelConfig
from .files import CODES
from .flops import parameters
from .fp8 import SCALE
from .hf import Survey
from .save import Piece, Progress, Running, at_once, combine, quiet
from .spec import hf_shape
from .stored import Stored, cuts


def describe(seen: Survey) -> str:
    """The text of `convert.py inspect`: family, sizes, parameters, a table of dtypes, and what is wrong."""
    counted = parameters(seen.cfg)
    lines = [
        f"{seen.directory}: {seen.cfg.model_type}, {seen.kind}",
        sizes(seen.cfg),
        f"parameters {counted.total:,}, active for a token {counted.active:,}"
        + (f"; of multi-token prediction besides {counted.mtp:,}" if counted.mtp else ""),
        "",
        f"{'dtype':<10}{'tensors':>10}{'values':>20}{'bytes':>20}",
    ]
    tensors, values = Counter(), Counter()
    for row in filter(None, seen.found.values()):
        tensors[row.dtype] += 1
        values[row.dtype] += math.prod(row.shape)
    for dtype, number in tensors.most_common():
        held = values[dtype]
        lines.append(f"{CODES[dtype]:<10}{number:>10,}{held:>20,}{held * dtype.itemsize:>20,}")
    lines.append("")
    lines += [f"notice: {notice}" for notice in seen.notices]
    lines += seen.faults or ["nothing missing, nothing unexpected"]
    return "\n".join(lines)


def sizes(cfg: ModelConfig) -> str:
    found = [
        f"{cfg.num_hidden_layers} layers, hidden {cfg.hidden_size}, {cfg.num_attention_heads} heads of {cfg.attention}",
        f"vocabulary {cfg.vocab_size}, positions {cfg.max_position_embeddings}",
    ]
    if cfg.n_routed_experts:
        dense = cfg.first_k_dense_replace
        found.append(f"{cfg.n_routed_experts} experts, {cfg.num_experts_per_tok} a token, from layer {dense} on")
    if cfg.index_topk:
        full = cfg.indexers.count("full")
        found.append(f"{cfg.index_topk} keys a query, selected by the indexers of {full} layers")
    if cfg.num_nextn_predict_layers:
        found.append(f"{cfg.num_nextn_predict_layers} layers of multi-token prediction")
    return "; ".join(found)


def checksum(seen: Survey, progress: Progress = quiet) -> str:
    """Read all parameters of a directory without faults -> the checksum that `save.Written` has of what it wrote."""
    stop, stored = Event(), seen.stored
    total = sum(math.prod(leaf.shape) * leaf.files.rows[leaf.source.keys[0]].dtype.itemsize for leaf in stored.values())
    with progress(total) as tick:

        def read(path: str, leaf: Stored) -> list[str]:
            running = Running()
            for piece in pieces(path, leaf, seen.cfg):
                if stop.is_set():
                    break
                running.add(piece)
                tick(piece.values.nbytes)
            return running.lines

        parts = at_once(read, stored.items(), os.cpu_count() or 1, stop)
        return combine(line for lines in parts for line in lines)


def pieces(path: str, leaf: Stored, cfg: ModelConfig) -> Iterator[Piece]:
    """A parameter's values as `save.Form.pieces` has them, but those of FP8 as they are stored."""
    source, files = leaf.source, leaf.files
    if source.scaled:
        for key in source.keys:
            yield from (Piece(key, files.read_flat(key, *part), path) for part in cuts(source.size))
            yield Piece(key, files.read(key + SCALE), path + SCALE)
        return
    size = hf_shape(source.row, cfg.dims)
    for begin in range(0, math.prod(leaf.shape), math.prod(size)):
        for start, count in cuts(size):
            yield Piece(path, leaf.read_flat(begin + start, count), path)
