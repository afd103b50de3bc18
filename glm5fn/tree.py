"""Nested dicts of tensors, and the flat dicts that files hold: a path is the nested keys joined by dots."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` in the tree's own order, depth first."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a nested dict into one flat dict of paths.

    >>> flatten({"layers": {"0": {"norm": 1}}, "norm": 2})
    {'layers.0.norm': 1, 'norm': 2}
    """
    return dict(leaves(tree))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a flat dict of paths into a nested dict; the inverse of `flatten`.

    >>> unflatten({'layers.0.norm': 1, 'norm': 2})
    {'layers': {'0': {'norm': 1}}, 'norm': 2}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def tree_map(function: Callable[..., Any], tree: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `function` leaf by leaf; the first tree gives the structure and the order, the others are looked up.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": {"z": 2}}, {"y": {"z": 20}, "x": 10})
    {'x': 11, 'y': {'z': 22}}
    """
    return {
        key: tree_map(function, value, *(other[key] for other in others))
        if isinstance(value, Mapping)
        else function(value, *(other[key] for other in others))
        for key, value in tree.items()
    }
