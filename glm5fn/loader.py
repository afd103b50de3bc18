"""The next batch, made in the background while a step computes."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .mesh import RunError

T = TypeVar("T")
PATIENCE = 600.0  # seconds after which data that does not come is an error


class Ahead(Generic[T]):
    """`make`, of which the result for `stride` further on is made in a thread after each call.

    waited: the seconds that the last call took. Raises RunError for data that cannot be used, or does not come within
    `patience` seconds.
    """

    def __init__(self, make: Callable[[int], T], stride: int, patience: float = PATIENCE) -> None:
        self.make, self.stride, self.patience = make, stride, patience
        self.start: int | None = None  # of what is being made
        self.waited = 0.0

    def __call__(self, start: int) -> T:
        began = time.perf_counter()
        if start != self.start:
            self.begin(start)
        try:
            found, error = self.box.get(timeout=self.patience)
        except queue.Empty:
            raise RunError(
                f"the data of sample {start} did not come in {self.patience:g} s: look at the disk that data.path is on"
            ) from None
        if error is not None:
            raise RunError(f"data: {error}") from error
        self.begin(start + self.stride)
        self.waited = time.perf_counter() - began
        return found  # pyright: ignore[reportReturnType]

    def begin(self, start: int) -> None:
        self.start = start
        self.box: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def work(box: queue.SimpleQueue[tuple[T | None, BaseException | None]] = self.box) -> None:
            try:
                box.put((self.make(start), None))
            except BaseException as error:
                box.put((None, error))

        threading.Thread(target=work, daemon=True).start()  # one that is stuck must not keep the process
