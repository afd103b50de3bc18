"""`Comm`: the exchanges that model code may ask for. `local()` is the identity, for one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .tree import tree_map

Tree = Mapping[str, Any]


class Span(NamedTuple):
    """Queries of a rank that stand one after the other: those from low to high, the last at key end - 1."""

    low: int
    high: int
    end: int


@dataclass(frozen=True)
class Comm:
    """The exchanges of one rank grid.

    fetch: (parameters as they rest, their rows) -> plain local tensors in the compute dtype, wide rows in at least
    fp32; their gradients take the way back. begin: starts it, and gives what fetch takes as third argument.
    sum: a plain tensor summed over all ranks, without gradient.
    split: how many ranks share the tokens of a row. parts: into how many equal parts a row must be cut for all ranks.
    mine: [b, t, ...] -> [b, s, ...], the tokens of each row that this rank's blocks compute.
    gather: tensors of one dtype [b, s, ...] -> each [b, t, ...], of all tokens in their order, in one exchange; the
    gradients of all ranks are summed on the way back.
    spans: s -> where these tokens stand.
    first: whether this rank is the first of those that share its rows.
    past: how many tokens stand before these, whose keys are kept, as those of these will be; None if none are.
    experts: (the kernel, x [n, d], chosen [n, a], weights [n, a], this rank's gate_up and down) -> [n, d], as the
    kernel on all experts; every rank must call it, with tokens or without.

    tp: how many ranks compute the same tokens, each with heads, hidden dims and token ids of its own. What stands
    between their blocks each of them has a part of: what it does there is its share of a sum over ranks, and so are the
    gradients of all parameters that they have alike.
    own: [b, s, ...] -> [b, r, ...], its part. enter: [b, r, d] -> [b, s, d]. leave: a share of [b, s, d] -> of the sum
    [b, r, d]. own_spans: s -> where its part stands.
    embed: (this rank's rows of the table, tokens [b, s]) -> [b, r, d].
    token_loss: (the kernel, x [n, d], this rank's rows of the head, targets [n]) -> its share of the loss.
    logits: [*b, v] of this rank's rows of the head -> of all of them.
    all_heads: [b, s, h, e] of this rank's heads -> [b, r, h, e] of all heads, without gradient.
    uncut: the exchanges for tokens that all of these ranks have, within blocks and between them; these if None.
    """

    fetch: Callable[..., Tree]
    sum: Callable[[Tensor], Tensor]
    begin: Callable[[Tree, Tree], Any] = lambda params, specs: None
    split: int = 1
    parts: int = 1
    mine: Callable[[Tensor], Tensor] = lambda values: values
    gather: Callable[..., tuple[Tensor, ...]] = lambda *parts: parts
    spans: Callable[[int], tuple[Span, ...]] = lambda steps: (Span(0, steps, steps),)
    experts: Callable[..., Tensor] = lambda kernel, *inputs: kernel(*inputs)
    first: bool = True
    past: int | None = None
    tp: int = 1
    own: Callable[[Tensor], Tensor] = lambda values: values
    enter: Callable[[Tensor], Tensor] = lambda x: x
    leave: Callable[[Tensor], Tensor] = lambda y: y
    own_spans: Callable[[int], tuple[Span, ...]] = lambda steps: (Span(0, steps, steps),)
    embed: Callable[[Tensor, Tensor], Tensor] = lambda table, tokens: F.embedding(tokens, table)
    token_loss: Callable[..., Tensor] = lambda kernel, *inputs: kernel(*inputs)
    logits: Callable[[Tensor], Tensor] = lambda logits: logits
    all_heads: Callable[[Tensor], Tensor] = lambda queries: queries
    uncut: "Comm | None" = None

    def alone(self) -> "Comm":
        """The exchanges for tokens that each of the ranks that share a row has all of."""
        return self if self.uncut is None else self.uncut


class Vocab(NamedTuple):
    """The part of the token ids that a rank computes. first: the lowest of them.

    highest, total: the maximum, and the sum, of each element over the ranks that have the parts.
    """

    first: int
    highest: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def local(dtype: torch.dtype | None = None) -> Comm:
    """One rank: nothing moves. Fetch still casts to the compute dtype where one is given."""

    def fetch(params: Tree, specs: Tree, started: None = None) -> Tree:
        return params if dtype is None else tree_map(lambda row, leaf: leaf.to(row.dtype(dtype)), specs, params)

    return Comm(fetch=fetch, sum=lambda x: x)


LOCAL = local()


def over_spans(
    function: Callable[..., Tensor],
    spans: Sequence[Span],
    queries: Sequence[Tensor | None],
    keys: Sequence[Tensor | None],
) -> Tensor:
    """Call a function, whose queries stand at the last of its keys, for each span; results side by side, or summed.

    queries: of this rank, and keys: of all, along dim 1. function: (*queries, *keys) -> [b, s, ...], or a sum [].
    """
    if len(spans) == 1 and all(part is None or part.shape[1] == spans[0].end for part in keys):
        return function(*queries, *keys)
    found = [
        function(
            *(None if part is None else part[:, span.low : span.high] for part in queries),
            *(None if part is None else part[:, : span.end] for part in keys),
        )
        for span in spans
    ]
    return torch.cat(found, 1) if found[0].dim() else torch.stack(found).sum()
