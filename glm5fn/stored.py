"""Which tensors of a model's directory serve which parameter, and how they are read."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import legacy
from .config import ModelConfig
from .files import Rows, as_bytes
from .fp8 import BLOCK, SCALE, dequantize, scale_shape
from .model import model_specs
from .spec import Param, Region, hf_groups, hf_keys, rows, shape, slices, whole
from .stores import Tensors

PIECE = 1 << 22  # how many values are held at a time while files are copied
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


Kind = Literal["native", "Hugging Face", "ChatGLM"]


class Source(NamedTuple):
    """The tensors of the files that serve a parameter.

    keys: several are stacked on the parameter's leading dims. groups: for each dim of one of them, the sizes of the
    parameter's dims that it joins. first: the row at which the parameter begins in a tensor that has `whole` rows.
    scaled: they are FP8, each with factors under a key of its own.
    """

    row: Param
    keys: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    first: int = 0
    whole: int | None = None
    scaled: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part that one key contributes."""
        return tuple(map(math.prod, self.groups))

    @property
    def contract(self) -> dict[str, tuple[int, ...]]:
        """Each key that must be there, and its shape."""
        rows, *rest = self.size
        found = dict.fromkeys(self.keys, (self.whole or rows, *rest))
        return found | ({key + SCALE: scale_shape(self.size) for key in self.keys} if self.scaled else {})


@dataclass(frozen=True)
class Stored:
    """A parameter at rest in its files: it has a shape and a dtype, and is read as a whole or in parts."""

    files: Tensors
    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the files; of FP8, bfloat16."""
        dtype = torch.bfloat16 if self.source.scaled else self.files.rows[self.source.keys[0]].dtype
        return at_rest(self.source.row, dtype)

    def read(self, region: Region | None = None) -> Tensor:
        """The tensor, or a region of it: (start, size) for each of its dims, as in `spec.Region`.

        Only that part is read; of dims that the file joins, all but the first are read whole and then cut.
        """
        region = whole(self.shape) if region is None else region
        keys, groups = self.source.keys, self.source.groups
        values = torch.empty([size for _, size in region], dtype=self.dtype)
        stacked = len(self.shape) - sum(map(len, groups))
        places = slices(region[:stacked])
        numbers = torch.arange(len(keys)).view(self.shape[:stacked])[places].flatten().tolist()
        targets = values.view(len(numbers), *values.shape[stacked:]).unbind()
        outer, sizes, inner, dims = [], [], [], iter(region[stacked:])
        for _, *joined in groups:
            (start, size), step = next(dims), math.prod(joined)
            outer.append((start * step, size * step))
            sizes += [size, *joined]
            inner += [slice(None), *(slice(first, first + n) for first, n in islice(dims, len(joined)))]
        (start, size), *others = outer
        for number, target in zip(numbers, targets, strict=True):
            part = self.files.read(keys[number], ((self.source.first + start, size), *others))
            if self.source.scaled:
                part = dequantize(part, self.scales(keys[number]), start, others[0][0])
            target.copy_(part.view(sizes)[tuple(inner)])
        return values

    def scales(self, key: str) -> Tensor:
        found = self.files.read(key + SCALE)
        if not (found.isfinite() & (found >= 0)).all():
            raise ValueError(f"{key}{SCALE} has factors that are negative or not finite")
        return found

    def read_flat(self, start: int, count: int) -> Tensor:
        """So many of its values from one on, in row-major order: of those of one key, and of FP8 whole rows."""
        source, files = self.source, self.files
        width = math.prod(source.size[1:])
        number, offset = divmod(start, width * source.size[0])
        key = source.keys[number]
        part = files.read_flat(key, source.first * width + offset, count)
        if source.scaled:
            part = dequantize(part.view(-1, width), self.scales(key), offset // width).flatten()
        return part.to(self.dtype)


def at_rest(row: Param, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in files whose tensors are of this one: a router's state is always in fp32.

    Its balance bias is a sum of small steps, and its last bits decide which expert is chosen.
    """
    return torch.float32 if row.part == "state" else dtype


def sources(cfg: ModelConfig, found: Rows, kind: Kind) -> dict[str, Source]:
    """The tensors that must serve each parameter, by path, in the model's order.

    Experts may come one by one or stacked, matrices in FP8: which it is shows in the keys that were found.
    """
    dims, served = cfg.dims, {}
    for path, row in rows(model_specs(cfg)):
        size, keys, groups = shape(row, dims), hf_keys(row, dims), hf_groups(row, dims)
        if kind == "native":
            served[path] = Source(row, (path,), tuple((n,) for n in size), size)
        elif kind == "ChatGLM":
            key, first, rows_there = legacy.place(keys[0], dims)
            served[path] = Source(row, (key,), groups, size, first, rows_there)
        elif (key := stacked_key(row)) and key in found:
            count, *pair = (dims[name] for name in row.stacked)
            first, *others = groups
            served[path] = Source(row, (key,), ((count,), (*pair, *first), *others), size)
        else:
            scaled = len(groups) == 2 and any(key + SCALE in found for key in keys)
            served[path] = Source(row, keys, groups, size, scaled=scaled)
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


def differing_copies(files: Tensors, wanted: Mapping[str, str]) -> list[str]:
    """What keeps copies that are there from being the bytes of their originals."""
    return [
        f"{copy} in {files.rows[copy].file} differs from {key}, which it must equal: remove one of them"
        for copy, key in wanted.items()
        if copy in files.rows
        and not (files.rows[copy][1:3] == files.rows[key][1:3] and same(files, copy, key))  # dtype and shape first
    ]


def same(files: Tensors, one: str, other: str) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes; a piece of each is held at a time."""
    parts = cuts(files.rows[one].shape)
    return all(as_bytes(files.read_flat(one, *part)) == as_bytes(files.read_flat(other, *part)) for part in parts)


def cuts(size: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, count) of the pieces in which the values of a tensor are read: whole rows, and whole rows of FP8 blocks.

    >>> list(cuts((300, PIECE // 200)))
    [(0, 2684288), (2684288, 2684288), (5368576, 922724)]
    """
    width = math.prod(size[1:])
    step = max(BLOCK, PIECE // max(width, 1) // BLOCK * BLOCK) * width
    total = math.prod(size)
    return ((start, min(step, total - start)) for start in range(0, total, max(step, 1)))
