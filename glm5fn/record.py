"""What a run tells: one JSON object a step in metrics.jsonl, a progress bar or plain lines, TensorBoard on request."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .directory import occupied

METRICS = "metrics.jsonl"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, one a step; half a line at the end, which a kill can leave, is none.

    Raises ValueError that names the file if a line is something else.
    """
    path = run / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    try:
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record | {"step": int(record["step"])} for record in records]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must hold one JSON object with a step on each line: {error!r}") from error


def steps_on_record(run: Path) -> int:
    """The number of the last step that a run has recorded."""
    return max((record["step"] for record in read_metrics(run)), default=0)


def tell(text: str) -> None:
    """Print a line for the person who watches, above the progress bar where there is one."""
    with tqdm.external_write_mode():
        print(text, flush=True)


@contextmanager
def occupy(out: Path) -> Iterator[None]:
    """Keep other processes from training in a run directory; one that is empty is gone afterwards.

    Raises ValueError if another process has it.
    """
    with occupied(out, f"{out}: another process trains in it: wait for its end, or set another --out"):
        try:
            yield
        finally:
            with suppress(OSError):
                out.rmdir()


class Recorder:
    """Appends to a run's record, from `step` on: what an abandoned attempt wrote beyond it is cut off.

    Numbers that are not finite become null, which JSON has. On ranks that do not write it does nothing.
    """

    def __init__(self, out: Path, step: int, steps: int, tensorboard: bool, writer: bool) -> None:
        self.writer, self.events = writer, None
        if not writer:
            return
        kept = [json.dumps(record) + "\n" for record in read_metrics(out) if record["step"] <= step]
        replacement = out / f".{METRICS}.partial"
        replacement.write_text("".join(kept))
        replacement.replace(out / METRICS)
        self.file = (out / METRICS).open("a")
        terminal = sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=not terminal, dynamic_ncols=True)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(out), purge_step=step + 1)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer:
            self.bar.close()
            self.file.close()
            if self.events is not None:
                self.events.close()

    def step(self, record: dict[str, Any]) -> None:
        if not self.writer:
            return
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in record.items()}
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in record.items() if k != "step"}
        if self.bar.disable:
            tell(f"step {record['step']} " + " ".join(f"{k} {v}" for k, v in shown.items()))
        else:
            self.bar.set_postfix(
                {k: shown[k] for k in ("loss", "lr", "tokens_per_second") if k in shown}, refresh=False
            )
            self.bar.update()
        if self.events is not None:
            for name, value in finite.items():
                if name != "step" and value is not None:
                    self.events.add_scalar(name, value, record["step"])
