"""Values built from what YAML or JSON gave, with their types checked."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be run; the command line answers it with exit code 2."""


def build(kind: Any, value: Any, name: str = "") -> Any:
    """Make a value of a type from what YAML or JSON gave; name: of the setting, with a dot after it."""
    origin, args, label = typing.get_origin(kind), typing.get_args(kind), name.removesuffix(".")
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{label or 'the file'} must be a mapping of settings, is {value!r}")
        types = typing.get_type_hints(kind)
        for key in value:
            if key not in types:
                near = difflib.get_close_matches(str(key), types, 1)
                raise ConfigError(f"{name}{key} is no setting" + (f": did you mean {near[0]}?" if near else ""))
        needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [f"{name}{key}" for key in needed if key not in value]:
            raise ConfigError(f"{', '.join(missing)} must be set")
        return kind(**{key: build(types[key], item, f"{name}{key}.") for key, item in value.items()})
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{label} ({value!r}) must be one of {', '.join(map(str, args))}")
    if origin is UnionType:
        return None if value is None and NoneType in args else build(args[0], value, name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(build(args[0], item, name) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: build(args[1], item, f"{name}{key}.") for key, item in value.items()}
    if kind is float and type(value) in (int, str):  # YAML takes 1e-4 for text
        with suppress(ValueError, OverflowError):
            return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise ConfigError(f"{label} ({value!r}) must be of type {getattr(kind, '__name__', kind)}")
