"""The two forms that tensors take in a checkpoint: whole ones in safetensors files, or arrays on tensorstore.

As safetensors, each tensor is gathered by one rank, which writes it into its own file of an item: all ranks own about
as many bytes, and hold one whole tensor at a time. As arrays, each rank writes the parts that it holds, and nothing is
gathered; they are below the checkpoint's directory, or where `ELSEWHERE` there says.
"""

import heapq
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tensorstore as ts
import torch
import xxhash
from torch import Tensor

from .arrays import Arrays
from .files import FORMAT, Rows, TensorFiles
from .mesh import Held
from .peers import Peers
from .spec import slices
from .writer import write_tensors

STATE = "state.json"  # in every checkpoint, and the last file of it to be written
ARRAYS = "arrays"  # the directory of arrays
ELSEWHERE = "arrays.json"  # the file that names another place of theirs
MANIFEST = "manifest.ocdbt"  # of every store of arrays
CHUNK = 1 << 24  # bytes of a file that are read at once
IN_FLIGHT = 2  # tensors that are being sent

Print = tuple[int, str]  # the bytes of a file, and their checksum (XXH3, 128 bits, in hexadecimal)
Tensors = TensorFiles | Arrays
Items = Mapping[str, Mapping[str, Held]]  # the tensors of each item of a checkpoint, by key


def write_files(directory: Path, items: Items, peers: Peers) -> tuple[dict[str, Print], str | None]:
    """Write the tensors that this rank owns, and send what others own -> (the prints of its files, what went wrong).

    When a file cannot be written, all is sent and received all the same. Another error leaves the exchange unfinished.
    """
    prints: dict[str, Print] = {}
    problem = None
    for item, tensors in items.items():
        owned = owners(tensors, peers.world)
        whole = exchanged(tensors, owned, peers)
        try:
            if (owned[peers.rank] or peers.rank == 0) and not problem:  # SGD has no moments, and says so
                rows = [(key, tensors[key].values.dtype, tensors[key].shape) for key in owned[peers.rank]]
                number = f"-{peers.rank + 1:05}-of-{peers.world:05}" if peers.world > 1 else ""
                path = directory / f"{item}{number}.safetensors"
                prints[path.name] = write_tensors(path, rows, whole, {"format": FORMAT})
        except (OSError, ValueError) as error:
            problem = str(error)
        deque(whole, maxlen=0)
    return prints, problem


def owners(tensors: Mapping[str, Held], world: int) -> list[list[str]]:
    """The tensors that each rank writes, of about as many bytes, in the order of all.

    >>> sizes = {"a": 4, "b": 1, "c": 2, "d": 2}
    >>> row = {key: Held((n,), (n,), (), torch.zeros(0)) for key, n in sizes.items()}
    >>> owners(row, 2)
    [['a', 'b'], ['c', 'd']]
    """
    loads = [(0, rank) for rank in range(world)]
    of: dict[str, int] = {}
    for key in sorted(tensors, key=lambda key: -tensors[key].bytes):
        load, of[key] = loads[0]
        heapq.heapreplace(loads, (load + tensors[key].bytes, of[key]))
    return [[key for key in tensors if of[key] == rank] for rank in range(world)]


def exchanged(tensors: Mapping[str, Held], owned: list[list[str]], peers: Peers) -> Iterator[Tensor | None]:
    """The whole tensors that this rank owns, in order; between them, what it holds of the others is sent.

    All ranks go through all tensors in one order, in turns of their owners, so none waits for one that waits for it.
    """
    sent: deque = deque()
    for turn in zip_longest(*owned):
        for owner, key in enumerate(turn):
            if key is None:
                continue
            if owner == peers.rank:
                yield gathered(tensors[key], peers)
            elif tensors[key].written_by(peers.rank) is not None:
                part = tensors[key].values.cpu().contiguous().flatten().view(torch.uint8)
                sent.append((peers.send(part, owner), part))
                if len(sent) > IN_FLIGHT:
                    sent.popleft()[0].wait()
    for work, _ in sent:
        work.wait()


def gathered(held: Held, peers: Peers) -> Tensor | None:
    """The whole of a tensor, on the rank that owns it; None without memory for it, and then too all is received."""
    if [rank for rank, _ in held.parts] == [peers.rank]:
        return held.values.cpu()
    whole = room_for(held)
    for source, region in held.parts:
        place = slices(region)
        if source == peers.rank:
            if whole is not None:
                whole[place].copy_(held.values)
            continue
        target = None if whole is None else whole[place]
        direct = target is not None and target.is_contiguous()
        part = target if direct else torch.empty([size for _, size in region], dtype=held.values.dtype)
        assert part is not None
        peers.receive(part.flatten().view(torch.uint8), source)
        if target is not None and not direct:
            target.copy_(part)
    return whole


def room_for(held: Held) -> Tensor | None:
    try:
        return torch.empty(held.shape, dtype=held.values.dtype)
    except (RuntimeError, MemoryError):
        return None


def place_of(directory: Path) -> str | None:
    """The URL of a checkpoint's arrays; None if it has none. Raises ValueError for a file that does not say where."""
    if (directory / ELSEWHERE).is_file():
        return elsewhere(directory)["url"]
    here = (directory / ARRAYS).resolve()
    return f"file://{quote(str(here))}/" if here.is_dir() else None


def elsewhere(directory: Path) -> dict[str, str]:
    """Where arrays are, and of which directory's checkpoints they are a part."""
    try:
        found = json.loads((directory / ELSEWHERE).read_text())
        return {name: str(found[name]) for name in ("url", "owner")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / ELSEWHERE} cannot be read ({error!r})") from error


def owned_url(directory: Path) -> str | None:
    """Where arrays are that go with a checkpoint; None if there are none, or it is a copy of the one that owns them."""
    if not (directory / ELSEWHERE).is_file():
        return None
    found = elsewhere(directory)
    return found["url"] if found["owner"] == str(directory.parent.resolve()) else None


def files_of(directory: Path) -> list[str]:
    """What a checkpoint consists of: files by their names below it, and the URLs of those that are elsewhere."""
    found = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    place = place_of(directory)
    if (directory / ELSEWHERE).is_file():
        found += [f"{place}{name.decode()}" for name in ts.KvStore.open(place).result().list().result()]
    if place and not any(name.endswith(MANIFEST) for name in found):
        raise OSError(f"{place}: what was written there is not there: the place cannot be shared or kept")
    return sorted(found)


def print_of(directory: Path, name: str) -> Print:
    """What one of these files holds. Raises OSError if it cannot be read."""
    digest, size = xxhash.xxh3_128(), 0
    if "://" in name:
        data = read_url(name)
        return len(data), xxhash.xxh3_128_hexdigest(data)
    with (directory / name).open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()


def prints_in(directory: Path) -> dict[str, Print]:
    """What a checkpoint says that its files hold."""
    return as_prints(json.loads((directory / STATE).read_text())["files"])


def as_prints(found: Any) -> dict[str, Print]:
    return {name: (int(size), str(checksum)) for name, (size, checksum) in dict(found).items()}


def altered(directory: Path, prints: Mapping[str, Print]) -> list[str]:
    """What of these files is not there, or does not hold what was written. Raises OSError for what cannot be read."""
    found = []
    for name, was in prints.items():
        try:
            if print_of(directory, name) != was:
                found.append(f"{directory / name} does not hold what was written: its checksum differs")
        except FileNotFoundError:
            found.append(f"{directory}: {name} is missing")
    return found


def read_url(url: str) -> bytes:
    place, _, name = url.rpartition("/")
    try:
        found = ts.KvStore.open(f"{place}/").result().read(name).result()
    except Exception as error:
        raise OSError(f"{url}: cannot be read ({error})") from error
    if found.state != "value":
        raise FileNotFoundError(f"{url}: is not there")
    return found.value


def discard(directory: Path) -> None:
    """Remove a checkpoint and what it owns elsewhere, which a copy of it does not. Raises OSError for what is left."""
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink()
        return
    problem = None
    try:
        if url := owned_url(directory):
            clear(url)
    except (OSError, ValueError) as error:
        problem = error
    shutil.rmtree(directory)
    if problem is not None:
        raise OSError(f"the arrays of {directory} were not removed: {problem}")


def clear(place: str) -> None:
    """Remove all files below a URL. Raises OSError."""
    try:
        ts.KvStore.open(place).result().delete_range(ts.KvStore.KeyRange()).result()
    except Exception as error:  # the library has many kinds
        raise OSError(f"{place}: {error}") from error


def open_item(directory: Path, item: str, check: Callable[[Rows], list[str]] = lambda rows: []) -> Tensors:
    """The tensors of an item of a checkpoint, by key. Raises ValueError as `TensorFiles.open` does."""
    if files := [name for name in prints_in(directory) if name.startswith(item) and name.endswith(".safetensors")]:
        return TensorFiles.open_files(directory, files, check)
    place = place_of(directory)
    if place is None:
        raise ValueError(f"{directory}: has neither files nor arrays of {item}")
    return Arrays.open(place, item, check)
