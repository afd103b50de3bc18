"""One training run: set up, then step, record and save until done."""

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, limits, mesh, model, settings
from .checkpoint import State
from .collectives import comm_for
from .corpora import open_data
from .data import Data, micro_batches
from .device import choose, peak_flops, synchronize, widest
from .flops import flops_per_token
from .hf import open_model
from .kernels import kernels_for
from .launch import Interrupt, restarts
from .loader import Ahead
from .losses import loss
from .manager import CheckpointManager
from .mesh import Grid, together
from .optim import grad_norm, init_moments
from .peers import Peers
from .record import Recorder, occupy, steps_on_record, tell
from .save import save_hf
from .settings import CONFIG, RunConfig
from .spec import Param, Region, init_region, shape, trained
from .step import Setup, evaluate, step
from .tree import flatten, unflatten

PATIENCE = 10  # steps in a row without an update, after which a run gives up


def train(
    run: RunConfig, out: Path, *, resume: str | None = None, init: Path | None = None, export: Path | None = None
) -> bool:
    """Train fresh, from the weights `init`, from a checkpoint `resume`, or from the newest one (`resume="auto"`).

    Writes config.yaml, metrics.jsonl and checkpoints/ into `out`, and a Hugging Face directory to `export` at the
    end, with the tokenizer files of `init`; a run that is done already changes no file of it. All ranks of a group call
    it alike. Returns whether the run came to its end: False if it was interrupted, in which case it has saved. Raises
    ConfigError for settings that cannot be run, and RunError, on all ranks together, for data or weights that cannot be
    used and for what breaks on the way.
    """
    limits.refuse(run)
    device = choose(run.device)
    if run.deterministic and device == "cpu":
        torch.set_num_threads(1)  # how torch cuts a sum depends on it, and so do the bits
    grid = mesh.make_grid(run.mesh, device)
    setup = make_setup(run, device, grid, together(lambda: open_data(run.data, run.model, run.seed)))
    with ExitStack() as stack:
        together(lambda: stack.enter_context(occupy(out)) if mesh.rank() == 0 else None)
        peers = Peers()
        path, notices = find(out / "checkpoints", resume, peers)
        state = together(lambda: begin(run, device, grid, path, init))
        text = settings.dump(run)
        notices = (*setup.data.notices, *notices, *(changes(path, text) if path else ()), *lost(out, state.step))
        for notice in notices:
            say(notice)
        ended = state.step >= run.steps
        if ended:
            say(f"nothing left to do: {state.step} steps are done, steps is {run.steps}")
        else:
            together(lambda: prepare(out, text))
            recorder = together(lambda: Recorder(out, state.step, run.steps, run.tensorboard, mesh.rank() == 0))
            manager = CheckpointManager(out / "checkpoints", run.checkpoint, text, peers)
            with recorder, Interrupt() as interrupt, manager:
                peak = peak_flops(device, compute_dtype(run))
                state, ended = follow(setup, state, manager, recorder, interrupt, peak)
        if ended and export is not None:
            together(lambda: export_to(export, state, run, init))
            say(f"exported to {export}")
    return ended


def say(text: str) -> None:
    """Tell the person who watches, once for all ranks."""
    if mesh.rank() == 0:
        tell(text)


def compute_dtype(run: RunConfig) -> torch.dtype:
    return torch.bfloat16 if run.precision == "bf16" else torch.float32


def make_setup(run: RunConfig, device: str, grid: Grid | None, data: Data) -> Setup:
    dtype = compute_dtype(run)
    comm = comm_for(grid, dtype, widest(device) if run.deterministic else torch.float32)
    return Setup(
        run=run,
        device=device,
        data=data,
        load=partial(micro_batches, data, run.data, *mesh.data_rank(run.mesh)),
        comm=comm,
        specs=(specs := model.model_specs(run.model)),
        trained=tuple(trained(specs, run.indexer.stage, run.mtp_depths)),
        loss=partial(
            loss,
            cfg=run.model,
            comm=comm,
            kernels=kernels_for(device, dtype),
            block=model.compiled() if run.compile else model.block,
            terms=run.terms,
            recompute=run.recompute == "layer",
        ),
    )


def find(root: Path, resume: str | None, peers: Peers) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, known to be whole, and what to say about it. RunError if one that is named is not.

    All ranks call it, and each reads a share of what is checked.
    """
    if resume is None:
        return None, []
    if resume != "auto":
        if found := checkpoint.damage(Path(resume), peers):
            raise mesh.RunError("; ".join(found))
        return Path(resume), [f"resuming {resume}"]
    path, skipped = checkpoint.newest(root, peers)
    if path is None and skipped:
        raise mesh.RunError(f"no checkpoint in {root} is whole ({'; '.join(skipped)}): repair one, or move them away")
    notices = [f"skipping a checkpoint that is not whole: {why}" for why in skipped]
    return path, [*notices, f"resuming {path}" if path else f"no checkpoint in {root}: starting at step 0"]


def begin(run: RunConfig, device: str, grid: Grid | None, path: Path | None, init: Path | None) -> State:
    specs, dims = model.model_specs(run.model), run.model.dims
    if path is not None:
        return checkpoint.restore(path, run, grid, device)
    if init is not None:
        stored = flatten(open_model(init, run.model)[1])

        def read(key: str, row: Param, region: Region) -> Tensor:
            values = stored[key].read(region)
            if row.part == "state" and not values.isfinite().all():  # which no gradient would show
                raise ValueError(f"--init {init}: {key} has numbers that are not finite")
            return values.to(device, torch.float32)
    else:

        def read(key: str, row: Param, region: Region) -> Tensor:
            return init_region(key, row, shape(row, dims), region, run.seed, run.model.initializer_range).to(device)

    params = mesh.place(specs, dims, grid, run.layout, read)
    flat = flatten(params)
    learning = unflatten({path: flat[path] for path in trained(specs, run.indexer.stage, run.mtp_depths)})
    return State(params=params, moments=init_moments(learning, run.optim))


def changes(path: Path, text: str) -> list[str]:
    """The settings that differ from those that a checkpoint was trained with."""
    found = settings.differences((path / CONFIG).read_text(encoding="utf-8"), text)
    differ = [f"{name} {change}" for name, change in found.items()]
    return [f"settings changed since the checkpoint: {'; '.join(differ)}"] if differ else []


def lost(out: Path, step: int) -> list[str]:
    """What a restart has to do again."""
    if not restarts():
        return []
    done = steps_on_record(out)
    again = f"steps {step + 1} to {done} were lost, and are done again" if done > step else "no step was lost"
    return [f"restart {restarts()}: {again}"]


def prepare(out: Path, text: str) -> None:
    if mesh.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(text, encoding="utf-8")


def follow(
    setup: Setup,
    state: State,
    manager: CheckpointManager,
    recorder: Recorder,
    interrupt: Interrupt,
    peak: float | None,
) -> tuple[State, bool]:
    """Step, record and save until the run ends or is interrupted. Returns the last state, and whether it ended."""
    run, idle, saved = setup.run, 0, state.step
    ended = True
    load = Ahead(setup.load, run.data.global_batch)
    setup = replace(setup, load=load)

    def save() -> None:
        if not torch.isfinite(grad_norm({"params": state.params, "moments": state.moments}, setup.comm)):
            raise mesh.RunError(f"step {state.step}: parameters or moments are not finite, so they were not saved")
        manager.save(state)
        while manager.notices:
            say(manager.notices.pop(0))

    while state.step < run.steps:
        start = time.perf_counter()
        stepped = step(setup, state, interrupt.asked)
        if stepped is None:
            say(f"interrupted after step {state.step}")
            ended = False
            break
        skipped = state.skipped
        state, record = stepped
        synchronize(setup.device)
        seconds = time.perf_counter() - start
        idle = idle + 1 if state.skipped > skipped else 0
        record |= speed(setup, seconds, peak) | {"data_seconds": load.waited}
        last = state.step == run.steps
        if last or (run.eval_every and state.step % run.eval_every == 0):
            record |= evaluate(setup, state.params)
        recorder.step(record)
        if idle == PATIENCE:
            raise mesh.RunError(
                f"step {state.step}: {idle} steps in a row had no finite gradient, or no label, and changed nothing: "
                "lower optim.lr, or look for what is wrong with the data or the weights"
            )
        if idle == 0 and run.checkpoint.every and state.step % run.checkpoint.every == 0:
            save()
            saved = state.step
    if saved != state.step:
        save()
    return state, ended


def speed(setup: Setup, seconds: float, peak: float | None) -> dict[str, Any]:
    """Tokens a second over all ranks, and the share of their peak that the model's FLOPs make (MFU)."""
    data = setup.run.data
    rate = data.global_batch * data.seq_len / seconds
    mfu = peak and rate * flops_per_token(setup.run.model, data.seq_len, setup.run.terms) / (peak * mesh.world())
    return {"tokens_per_second": rate, "mfu": mfu}


def export_to(path: Path, state: State, run: RunConfig, beside: Path | None) -> None:
    writer = mesh.rank() == 0
    save_hf(path, state.params, run.model, beside=beside, gather=mesh.whole_tensor, writer=writer)
