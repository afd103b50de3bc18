"""Compare the losses of two runs: figures, a verdict and a picture of the curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from tyro.conf import Positional, arg

from .record import METRICS, read_metrics
from .typed import ConfigError

Records = Mapping[int, Mapping[str, Any]]  # by step


@dataclass(frozen=True)
class Curves:
    """A logged value of two runs, over the steps at which it is finite in both."""

    name: str
    steps: Sequence[int]
    a: Sequence[float]
    b: Sequence[float]
    gaps: Sequence[float]  # |a - b| at each step
    lost: Sequence[int]  # the steps at which it is finite in neither
    uneven: Sequence[int]  # the steps at which it is finite in one of the two alone

    @property
    def average(self) -> float:
        return fmean(self.gaps)

    def relative(self) -> "Curves":
        """The same with each gap divided by the larger of the two values."""
        sizes = (max(abs(x), abs(y)) or 1.0 for x, y in zip(self.a, self.b, strict=True))
        gaps = [gap / size for gap, size in zip(self.gaps, sizes, strict=True)]
        return Curves(f"{self.name} (relative)", self.steps, self.a, self.b, gaps, self.lost, self.uneven)


def compare(
    run_a: Annotated[Positional[Path], arg(metavar="RUN_A")],
    run_b: Annotated[Positional[Path], arg(metavar="RUN_B")],
    *,
    tolerance: float = 1e-6,
    first: Annotated[int | None, arg(metavar="N")] = None,
    plot: Annotated[Path, arg(metavar="FILE.png")] = Path("compare.png"),
) -> int:
    """Compare the losses of two runs step by step: PASS if none differs by more than the tolerance on average.

    The exit code is 0 for PASS, 1 for FAIL, and 2 (ConfigError) where there is nothing to compare.

    Args:
        run_a: a run directory
        run_b: the run directory to compare it with
        tolerance: the largest average |difference| of a loss that passes, in nats a token
        first: leave out the steps after this one
        plot: where to draw the curves
    """
    if not tolerance >= 0:
        raise ConfigError(f"--tolerance ({tolerance}) must be at least 0")
    if first is not None and first < 1:
        raise ConfigError(f"--first ({first}) must be at least 1")
    a, b = read(run_a, first), read(run_b, first)
    losses = [join(a, b, name) for name in loss_names((*a.values(), *b.values()))]
    if not losses or not losses[0].steps:
        raise ConfigError(
            f"loss must be a finite number at some step of both runs, is so at none of {span(a)} of {run_a} and "
            f"{span(b)} of {run_b}: name two runs that overlap"
        )
    print(f"a: {run_a}, {span(a)}\nb: {run_b}, {span(b)}")
    print(table((*losses, join(a, b, "grad_norm").relative())))
    same_name = run_a.resolve().name == run_b.resolve().name
    labels = [str(run) if same_name else run.resolve().name for run in (run_a, run_b)]
    draw(plot, losses, labels, tolerance)
    print(f"curves drawn to {plot}")
    faults = [
        *(f"{c.name} differs by {c.average:.3g} on average" for c in losses if c.steps and c.average > tolerance),
        *(f"{c.name} is finite in one run alone at {listing(c.uneven)}" for c in losses if c.uneven),
    ]
    print(f"FAIL: {'; '.join(faults)}" if faults else "PASS", f"(tolerance {tolerance:g})")
    return 1 if faults else 0


def read(run: Path, first: int | None) -> Records:
    """The records of a run by step, up to the step `first`."""
    try:
        records = {record["step"]: record for record in read_metrics(run)}
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if not records:
        raise ConfigError(f"{run} must be the directory of a run that has made a step, has no record in {METRICS}")
    return {step: record for step, record in sorted(records.items()) if first is None or step <= first}


def loss_names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """`loss`, then every other key that ends in it."""
    return list(dict.fromkeys(["loss", *(key for record in records for key in record if key.endswith("loss"))]))


def join(a: Records, b: Records, name: str) -> Curves:
    """One value of two runs, over the steps at which both have logged it."""
    both = [step for step in a if step in b and name in a[step] and name in b[step]]
    finite = {step: [is_finite(records[step][name]) for records in (a, b)] for step in both}
    steps = [step for step in both if all(finite[step])]
    values_a, values_b = ([records[step][name] for step in steps] for records in (a, b))
    return Curves(
        name=name,
        steps=steps,
        a=values_a,
        b=values_b,
        gaps=[abs(x - y) for x, y in zip(values_a, values_b, strict=True)],
        lost=[step for step in both if not any(finite[step])],
        uneven=[step for step in both if any(finite[step]) and not all(finite[step])],
    )


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def span(records: Records) -> str:
    return f"steps {min(records)} to {max(records)}" if records else "no steps"


def listing(steps: Sequence[int]) -> str:
    """Name some steps, the first few of many."""
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return f"step {', '.join(map(str, steps[:5]))}{more}"


def table(rows: Iterable[Curves]) -> str:
    """The average and the maximum gap of each row, and what could not be compared."""
    lines = [f"{'|a - b|':22}{'steps':>8}{'average':>12}{'maximum':>12}{'at step':>9}"]
    for row in rows:
        line = f"{row.name:22}{len(row.steps):8}"
        if row.steps:
            worst = max(row.gaps)
            line += f"{row.average:12.3e}{worst:12.3e}{row.steps[row.gaps.index(worst)]:9}"
        lines.append(line)
        if row.lost:
            lines.append(f"  left out, finite in neither run: {listing(row.lost)}")
        if row.uneven:
            lines.append(f"  left out, finite in one run alone: {listing(row.uneven)}")
    return "\n".join(lines)


def draw(path: Path, losses: Sequence[Curves], labels: Sequence[str], tolerance: float) -> None:
    """Draw each loss of both runs, one column a loss, and the gap on a log axis below it, as PNG.

    Losses that the runs share at a single step are not curves, and are left to the table.
    """
    from matplotlib.figure import Figure

    drawn = [curves for curves in losses if len(curves.steps) > 1] or losses[:1]
    figure = Figure(figsize=(8 * len(drawn), 7), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(drawn), sharex="col", squeeze=False, height_ratios=(3, 2))
    for (upper, lower), curves in zip(axes.T, drawn, strict=True):
        # The first run is a broad band, so that it still shows where the second one covers it.
        upper.plot(curves.steps, curves.a, color="tab:orange", linewidth=5, alpha=0.6, label=labels[0])
        upper.plot(curves.steps, curves.b, ".-", color="tab:blue", linewidth=1, markersize=3, label=labels[1])
        upper.set_ylabel(f"{curves.name} (nats per token)")
        upper.legend()
        if any(curves.gaps):
            lower.semilogy(curves.steps, curves.gaps, ".-", color="tab:gray", linewidth=0.8, markersize=4)
            lower.axhline(curves.average, color="black", linestyle=":", label=f"average {curves.average:.2g}")
            lower.axhline(tolerance, color="tab:red", linestyle="--", label=f"tolerance {tolerance:g}")
            lower.legend(loc="lower right")
        else:  # a log axis has no place for zeros
            lower.text(0.5, 0.5, "equal at every step", transform=lower.transAxes, ha="center", va="center")
            lower.set_yticks([])
        lower.set_ylabel("|difference| (nats per token)")
        lower.set_xlabel("step")
        lower.xaxis.get_major_locator().set_params(integer=True)
        for axis in (upper, lower):
            axis.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written ({error.strerror}): name another place") from error
