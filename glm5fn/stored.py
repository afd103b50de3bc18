"""Which tensors of a model's directory serve which parameter, and how they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from .config import ModelConfig
from .files import Rows, TensorFiles
from .model import model_specs
from .spec import Param, Region, hf_groups, hf_keys, rows, shape, whole

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Source(NamedTuple):
    """The keys that serve a parameter.

    groups: for each dim of the files' tensors, the sizes of the dims that it joins. Several keys are stacked on the
    parameter's leading dims.
    """

    row: Param
    keys: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.groups))


@dataclass(frozen=True)
class Stored:
    """A parameter at rest in its files: it has a shape and a dtype, and is read as a whole or by region."""

    files: TensorFiles
    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return at_rest(self.source.row, self.files.rows[self.source.keys[0]].dtype)

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor, or a region of it: (start, size) for each of its dims, as in `spec.Region`.

        Only that part is read; of dims that the file joins, all but the first are read whole and then cut.
        """
        region = whole(self.shape) if region is None else region
        keys, groups = self.source.keys, self.source.groups
        values = torch.empty([size for _, size in region], dtype=self.dtype)
        stacked = len(self.shape) - sum(map(len, groups))
        places = tuple(slice(start, start + size) for start, size in region[:stacked])
        numbers = torch.arange(len(keys)).view(self.shape[:stacked])[places].flatten().tolist()
        targets = values.view(len(numbers), *values.shape[stacked:]).unbind()
        outer, sizes, inner, dims = [], [], [], iter(region[stacked:])
        for _, *joined in groups:
            (start, size), step = next(dims), math.prod(joined)
            outer.append((start * step, size * step))
            sizes += [size, *joined]
            inner += [slice(None), *(slice(first, first + n) for first, n in islice(dims, len(joined)))]
        for number, target in zip(numbers, targets, strict=True):
            target.copy_(self.files.read(keys[number], tuple(outer)).view(sizes)[tuple(inner)])
        return values


def at_rest(row: Param, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in files whose tensors are of this one: a router's state stays in fp32.

    Its balance bias is a sum of small steps, and its last bits decide which expert is chosen.
    """
    return row.dtype(dtype) if row.part == "state" else dtype


def sources(cfg: ModelConfig, found: Rows, native: bool) -> dict[str, Source]:
    """The tensors that must serve each parameter, by path, in the model's order.

    Experts may come one by one or stacked; which it is shows in the keys that were found.
    """
    dims, served = cfg.dims, {}
    for path, row in rows(model_specs(cfg)):
        size = shape(row, dims)
        if native:
            served[path] = Source(row, (path,), tuple((n,) for n in size), size)
        elif (key := stacked_key(row)) and key in found:
            count, *pair = (dims[name] for name in row.stacked)
            first, *others = hf_groups(row, dims)
            served[path] = Source(row, (key,), ((count,), (*pair, *first), *others), size)
        else:
            served[path] = Source(row, hf_keys(row, dims), hf_groups(row, dims), size)
    return served


def stacked_key(row: Param) -> str | None:
    """The key of all experts in one tensor, gate before up, as transformers holds them in memory.

    >>> stacked_key(Param("expert pair ffn embed", hf=("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight")))
    'experts.gate_up_proj'
    """
    if "{e}" not in row.patterns[0]:
        return None
    before, _ = row.patterns[0].split("{e}")
    names = [pattern.split("{e}.")[1].removesuffix("_proj.weight") for pattern in row.patterns]
    return f"{before}{'_'.join(names)}_proj"


def copies(cfg: ModelConfig) -> dict[str, str]:
    """Hugging Face keys that need not be there, each with the one whose equal it must be if it is."""
    head = EMBED if cfg.tie_word_embeddings else HEAD
    layers = [f"model.layers.{cfg.num_hidden_layers + i}" for i in range(cfg.num_nextn_predict_layers)]
    return (
        ({HEAD: EMBED} if cfg.tie_word_embeddings else {})
        | {f"{layer}.embed_tokens.weight": EMBED for layer in layers}
        | {f"{layer}.shared_head.head.weight": head for layer in layers}
    )


def without_absent_mtp(cfg: ModelConfig, found: Rows) -> ModelConfig:
    """The config, with multi-token prediction off if no tensor of it was found.

    transformers keeps `num_nextn_predict_layers` in the config of a model that it saves without these layers.
    """
    behind = range(cfg.num_hidden_layers, cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
    if any(key.startswith(f"model.layers.{layer}.") for key in found for layer in behind):
        return cfg
    return replace(cfg, num_nextn_predict_layers=0, num_mtp_depths=0)


def differing_copies(files: TensorFiles, wanted: Mapping[str, str]) -> list[str]:
    """What keeps copies that are there from being the bytes of their originals."""
    return [
        f"{copy} in {files.rows[copy].file} differs from {key}, which it must equal: remove one of them"
        for copy, key in wanted.items()
        if copy in files.rows
        and not (
            files.rows[copy][1:] == files.rows[key][1:]  # dtype and shape
            and torch.equal(files.read(copy), files.read(key))
        )
    ]
