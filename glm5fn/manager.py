"""The checkpoints of a run as they are written: in the background, whole or not at all, and which of them stay."""

import json
import secrets
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from .arrays import write_arrays
from .checkpoint import COUNTERS, State, defects, number, steps, write_state
from .device import synchronize
from .directory import aside, atomic_directory, settle
from .mesh import Held, RunError, held
from .peers import Peers
from .settings import CONFIG, CheckpointConfig
from .stores import (
    ARRAYS,
    ELSEWHERE,
    Items,
    Print,
    clear,
    discard,
    files_of,
    owned_url,
    place_of,
    print_of,
    write_files,
)
from .tree import flatten


class CheckpointManager:
    """Saves the states of a run in `root`, one at a time, and keeps the newest. All ranks of a run make one alike.

    In the background, if it is asked for: the state is copied, and written while training goes on. A save waits for
    the one before it. What goes wrong with one is raised by the next call, as RunError on every rank, and then what was
    there before still is: nothing is dropped before the new one is whole.
    """

    def __init__(self, root: Path, cfg: CheckpointConfig, config: str, peers: Peers) -> None:
        self.root, self.cfg, self.config, self.peers = root, cfg, config, peers
        self.copies: dict[str, Tensor] = {}  # on the host, used again by each save
        self.thread: threading.Thread | None = None
        self.problem: str | None = None
        self.notices: list[str] = []  # what a user should be told, from rank 0

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self.thread is not None:  # let it end, but not for long: its peers may be gone
            self.thread.join(timeout=60)

    def save(self, state: State) -> None:
        """Write `root/step_N`; then drop what is not to be kept, and later steps, which a resume abandoned."""
        self.wait()
        trees = {"params": state.params, "moments": state.moments}
        items = {name: {key: held(leaf) for key, leaf in flatten(tree).items()} for name, tree in trees.items()}
        counters = {name: getattr(state, name) for name in COUNTERS}
        if self.cfg.background:
            self.thread = threading.Thread(target=self.write, args=(self.copied(items), counters), daemon=True)
            self.thread.start()
        else:
            self.write(items, counters)
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises RunError on all ranks if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        problem, self.problem = self.problem, None
        if problem is not None:
            raise RunError(problem)

    def copied(self, items: Items) -> Items:
        """The items with copies of this rank's parts, which later steps do not change."""
        found: dict[str, dict[str, Held]] = {}
        for name, tensors in items.items():
            found[name] = {}
            for key, part in tensors.items():
                at, values = f"{name}.{key}", part.values
                if at not in self.copies:
                    self.copies[at] = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                self.copies[at].copy_(values, non_blocking=values.is_cuda)
                found[name][key] = part._replace(values=self.copies[at])
        for kind in {part.values.device.type for tensors in items.values() for part in tensors.values()}:
            synchronize(kind)
        return found

    def write(self, items: Items, counters: Mapping[str, int]) -> None:
        """What all ranks do alike; afterwards `problem` is what went wrong on any of them."""
        path = self.root / f"step_{counters['step']:08}"
        directory, peers = aside(path.resolve(), "partial"), self.peers
        try:
            with ExitStack() as stack:
                peers.together(lambda: self.begin(path, stack))
                own, problem = self.write_items(directory, items)
                peers.agree(problem)
                prints = merged(peers.gather(own))
                names = peers.gather(peers.together(lambda: files_of(directory)))[0]
                rest = [name for name in names if name not in prints][peers.rank :: peers.world]
                prints |= merged(
                    peers.gather(peers.together(lambda: {name: print_of(directory, name) for name in rest}))
                )
                peers.together(lambda: self.commit(path, stack, directory, counters, prints))
        except RunError as error:
            self.problem = f"saving checkpoint {path} failed: {error}"
            with suppress(Exception):
                peers.gather(None)  # by when rank 0 has removed what was begun
        except Exception as error:  # a peer is gone
            self.problem = f"saving checkpoint {path} failed: {error!r}"

    def begin(self, path: Path, stack: ExitStack) -> None:
        """Rank 0 makes the directory that all write into; it is gone again if the stack ends before the commit."""
        if self.peers.rank:
            return
        self.root.mkdir(exist_ok=True)  # in a run's directory, which was there
        for left in self.root.glob(".step_*.partial"):  # by processes that were killed
            self.drop(left)
        if path.exists() and defects(path):  # and could not be told from what is not ours
            self.drop(path)
        url = f"{self.cfg.url.rstrip('/')}/{path.name}-{secrets.token_hex(4)}/" if self.cfg.url else None
        if url:
            stack.push(lambda kind, *_: self.cleared(url) if kind else None)
        directory = stack.enter_context(atomic_directory(path, overwrite=True))
        (directory / CONFIG).write_text(self.config, encoding="utf-8")
        if url:
            where = {"url": url, "owner": str(self.root.resolve())}
            (directory / ELSEWHERE).write_text(json.dumps(where) + "\n")
        elif self.cfg.store == "tensorstore":
            (directory / ARRAYS).mkdir()

    def write_items(self, directory: Path, items: Items) -> tuple[dict[str, Print], str | None]:
        """Write this rank's part -> (the prints of files that are known already, what went wrong)."""
        if self.cfg.store == "safetensors":
            return write_files(directory, items, self.peers)
        tensors = {f"{name}/{key}": part for name, item in items.items() for key, part in item.items()}
        try:
            place = place_of(directory)
            if place is None:
                raise OSError(f"{directory} is not there: all ranks must see the directory of a run")
            write_arrays(place, tensors, self.peers.rank)
        except (OSError, ValueError) as error:
            return {}, str(error)
        return {}, None

    def commit(
        self, path: Path, stack: ExitStack, directory: Path, counters: Mapping[str, int], prints: Mapping[str, Print]
    ) -> None:
        if self.peers.rank:
            return
        write_state(directory, counters, prints)
        older = None  # where the arrays are of a save of the same step
        with suppress(OSError, ValueError):
            older = owned_url(path)
        stack.close()
        if older:
            self.cleared(older)
        self.prune(number(path))

    def prune(self, step: int) -> None:
        for left in self.root.glob(".step_*.replaced"):  # by a process that was killed
            settle(self.root / left.stem[1:])
        whole = [path for path in steps(self.root) if not defects(path)]
        before = [path for path in whole if number(path) <= step]
        keep, every = self.cfg.keep, self.cfg.keep_every
        kept = [path for n, path in enumerate(before) if n < keep or (every and number(path) % every == 0)]
        for path in whole:
            if path not in kept:
                self.drop(path.rename(aside(path, "partial")))  # so that no half of it can be left under its name

    def drop(self, path: Path) -> None:
        """Remove a checkpoint; one that cannot be removed is told, and no reason to stop."""
        try:
            discard(path)
        except OSError as error:
            self.notices.append(str(error))

    def cleared(self, url: str) -> None:
        try:
            clear(url)
        except OSError as error:
            self.notices.append(f"not removed: {error}")


def merged(parts: Iterable[Mapping[str, Print]]) -> dict[str, Print]:
    return {name: found for part in parts for name, found in part.items()}
