"""Values with gradients, as a function of a parameter tree."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .tree import leaves, unflatten


def value_and_grad(
    function: Callable[..., tuple[Tensor, Any]],
    dtype: torch.dtype | None = None,
    trained: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Turn `function(params, ...) -> (value, aux)` into one that returns `((value, aux), grads)`.

    grads: a tree like params, in `dtype` (that of the parameters when absent), zero where nothing was used; of the
    leaves at the paths `trained` alone where these are given. With
    `into=grads` of an earlier call, the new gradients are added to those in place, which needs half the memory of a
    second tree. The parameters themselves are left alone: gradients are taken at fresh aliases of them.
    """

    def run(params: Mapping[str, Any], *args: Any, into: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        flat = {path: leaf.detach().to(dtype or leaf.dtype) for path, leaf in leaves(params)}
        learning = {path: flat[path].requires_grad_() for path in (flat if trained is None else trained)}
        for path, grad in leaves(into or {}):
            learning[path].grad = grad
        value, aux = function(unflatten(flat), *args, **kwargs)
        value.backward()
        grads = {p: torch.zeros_like(alias) if alias.grad is None else alias.grad for p, alias in learning.items()}
        return (value.detach(), aux), unflatten(grads)

    return run
