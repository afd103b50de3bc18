"""All ranks, as the writers of a checkpoint talk to each other: beside the training, in a group of their own."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from .mesh import agree, gather, rank, together, world

T = TypeVar("T")


class Peers:
    """A group of all ranks for tensors on the CPU; all must make it alike. One process is its own."""

    def __init__(self) -> None:
        made = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.group: dist.ProcessGroup | None = made  # pyright: ignore[reportAttributeAccessIssue]

    def gather(self, value: T) -> list[T]:
        return gather(value, self.group)

    def agree(self, problem: str | None) -> None:
        agree(problem, self.group)

    def together(self, function: Callable[[], T]) -> T:
        return together(function, self.group)

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Begin to send a tensor, which must stay as it is until the result's `wait`."""
        work = dist.isend(tensor, to, group=self.group)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int) -> None:
        dist.recv(tensor, source, group=self.group)

    @property
    def rank(self) -> int:
        return rank()

    @property
    def world(self) -> int:
        return world()
