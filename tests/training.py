"""Small runs of train.py in this process, and checkpoints."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from glm5fn.checkpoint import State, newest, read_state
from glm5fn.manager import CheckpointManager
from glm5fn.peers import Peers
from glm5fn.record import read_metrics
from glm5fn.settings import CheckpointConfig
from train import main

SIZES = {
    "vocab-size": 261,
    "hidden-size": 24,
    "intermediate-size": 40,
    "num-hidden-layers": 2,
    "num-attention-heads": 3,
    "num-key-value-heads": 1,
    "head-dim": 8,
}
TINY = [part for name, size in SIZES.items() for part in (f"--model.{name}", str(size))]
BATCH = ["--data.seq-len", "12", "--data.global-batch", "4", "--data.micro-batch", "2"]
RUN = [*TINY, *BATCH, "--optim.warmup-steps", "5"]
WORDS = "the quick brown fox jumps over the lazy dog and the hen sees it. "


def text(directory: Path) -> Path:
    """Twelve windows of 12 bytes to train on, and one that is held out."""
    path = directory / "text.txt"
    path.write_text((WORDS * 3)[: 13 * 12 - 2])
    return path


def fixed(path: Path, *seeds: int | None) -> Path:
    """Fixed batches of 12 tokens: a row for each seed; None makes one without a label."""
    rows = [torch.randint(0, 99, (13,), generator=torch.Generator().manual_seed(seed or 0)) for seed in seeds]
    masked = torch.tensor([[seed is None] for seed in seeds])
    tokens, targets = (torch.stack([row[cut] for row in rows]) for cut in (slice(0, 12), slice(1, 13)))
    save_file({"tokens": tokens, "targets": targets.masked_fill(masked, -100)}, path)
    return path


def train(*argv: str | Path) -> int:
    """The exit code of `train.py`, without the time that it takes to measure the CPU."""
    with patch("glm5fn.run.peak_flops", return_value=None):
        try:
            return main([str(part) for part in argv])
        except SystemExit as end:
            return int(end.code or 0)


@cache
def peers() -> Peers:
    """Those of this process; each has groups of its own, and these have threads."""
    return Peers()


def save(root: Path, state: State, config: str, **how: Any) -> Path:
    """Write a checkpoint, and wait for it."""
    with CheckpointManager(root, CheckpointConfig(**({"background": False} | how)), config, peers()) as manager:
        manager.save(state)
    return root / f"step_{state.step:08}"


def numbers(out: Path) -> list[tuple]:
    """What of a run's record must not depend on how it was run."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")
    return [tuple(row[name] for name in names) for row in read_metrics(out)]


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """When each file below a directory was written, and what it holds."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def state(out: Path) -> tuple[dict[str, int], bytes, bytes]:
    """What the newest checkpoint of a run holds: the counters, and the bits of parameters and moments."""
    path, _ = newest(out / "checkpoints")
    assert path is not None
    return read_state(path)[0], (path / "params.safetensors").read_bytes(), (path / "moments.safetensors").read_bytes()
