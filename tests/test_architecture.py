"""Imports go downwards only, torch.distributed stays in its room, and no file holds two ideas."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each room may import from those before it.
ORDER = [
    *("typed", "architecture", "tree", "legacy", "config", "ops", "comm", "spec", "settings"),
    *("text", "sources", "limits"),
    *(
        "device",
        "kernels",
        "mesh",
        "fetch",
        "collectives",
        "directory",
        "files",
        "writer",
        "fp8",
        "peers",
        "arrays",
        "stores",
    ),
    *("gqa", "mla", "dsa", "ffn", "moe", "batch", "block", "model", "mtp", "losses", "shell"),
    *("decode", "sampling", "speculate", "generate"),
    *("stored", "hf", "save", "flops", "describe"),
    *("indexed", "packing", "data", "chat", "corpora", "loader"),
    *("grad", "optim", "checkpoint", "manager", "record", "launch", "compare", "shards", "prepare", "inspect_data"),
    *("inference", "score", "perplexity", "mmlu", "evaluate", "converse", "complete", "harness"),
    *("step", "run", "rehearsal", "textbook", "plan", "command", "__init__", "__main__", "configs", "train", "convert"),
]
DISTRIBUTED = {"mesh", "peers", "fetch", "collectives", "launch", "rehearsal"}
MODULES = [*sorted((ROOT / "glm5fn").rglob("*.py")), *(ROOT / f"{name}.py" for name in ("configs", "train", "convert"))]
EACH_MODULE = pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES])


def room(path):
    """The name by which a module stands in ORDER; kernels is one room."""
    return "kernels" if path.parent.name == "kernels" else path.stem


def imports(path):
    """Absolute names of all that a module imports."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@EACH_MODULE
def test_a_module_imports_only_from_rooms_before_its_own(path):
    below = ORDER[: ORDER.index(room(path))]
    for name in imports(path):
        package, *parts = name.split(".")
        other = package if package in ORDER else parts[0] if package == "glm5fn" and parts else None
        if other in ORDER and other != room(path):
            assert other in below, f"{room(path)} imports {other}"


@EACH_MODULE
def test_torch_distributed_is_used_in_few_rooms(path):
    assert room(path) in DISTRIBUTED or not any(name.startswith("torch.distributed") for name in imports(path))


@EACH_MODULE
def test_the_oracle_is_never_imported_by_the_library(path):
    assert not any(name.split(".")[0] == "transformers" for name in imports(path))


@EACH_MODULE
def test_a_file_has_at_most_300_lines(path):
    assert len(path.read_text().splitlines()) <= 300
