"""Values with gradients, as a function of a parameter tree."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .tree import flatten, leaves, tree_map


def value_and_grad(function: Callable[..., tuple[Tensor, Any]], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """Turn `function(params, ...) -> (value, aux)` into one that returns `((value, aux), grads)`.

    grads: a tree like params, in `dtype` (that of the parameters when absent), zero where nothing was used. With
    `into=grads` of an earlier call, the new gradients are added to those in place, which needs half the memory of a
    second tree. The parameters themselves are left alone: gradients are taken at fresh aliases of them.
    """

    def run(params: Mapping[str, Any], *args: Any, into: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        aliases = tree_map(lambda leaf: leaf.detach().to(dtype or leaf.dtype).requires_grad_(), params)
        flat = flatten(aliases)
        for path, grad in leaves(into or {}):
            flat[path].grad = grad
        assert not into or len(flatten(into)) == len(flat)
        value, aux = function(aliases, *args, **kwargs)
        value.backward()
        grads = tree_map(lambda alias: torch.zeros_like(alias) if alias.grad is None else alias.grad, aliases)
        return (value.detach(), aux), grads

    return run
