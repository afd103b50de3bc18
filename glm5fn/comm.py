"""`Comm`: the exchanges that model code may ask for. `local()` is the identity, for one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tree import tree_map

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class Comm:
    """The exchanges of one rank grid.

    fetch: (parameters as they rest, their rows) -> plain local tensors in the compute dtype, wide rows in at least
    fp32; their gradients take the way back.
    sum: a plain tensor summed over all ranks, without gradient.
    """

    fetch: Callable[[Tree, Tree], Tree]
    sum: Callable[[Tensor], Tensor]


def local(dtype: torch.dtype | None = None) -> Comm:
    """One rank: nothing moves. Fetch still casts to the compute dtype where one is given."""

    def fetch(params: Tree, specs: Tree) -> Tree:
        return params if dtype is None else tree_map(lambda row, leaf: leaf.to(row.dtype(dtype)), specs, params)

    return Comm(fetch=fetch, sum=lambda x: x)


LOCAL = local()
