"""Real processes: the launcher, torchrun, signals and kills. None may stay behind."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm5fn import checkpoint
from glm5fn.record import read_metrics
from glm5fn.stores import open_item

ROOT = Path(__file__).parent.parent
TINY = [
    *("--model.hidden-size", "24", "--model.intermediate-size", "40", "--model.num-hidden-layers", "2"),
    *("--data.seq-len", "16", "--data.global-batch", "4", "--data.micro-batch", "1", "--data.held-out", "0"),
]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FOREVER = ["--steps", "100000", "--optim.decay-steps", "200000", "--checkpoint.every", "100000"]


def start(*argv, launcher=(sys.executable,), into=subprocess.PIPE):
    """train.py in a process group of its own, with an environment that no launcher has touched.

    into: a file for what it prints, if that is more than a pipe holds before it is read.
    """
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "PYTEST_XDIST_WORKER"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.Popen(
        [*launcher, str(ROOT / "train.py"), *map(str, argv)],
        env=environment,
        stdout=into,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=240):
    """The exit code and all that was printed."""
    try:
        printed, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, printed


def processes_of(out):
    """The ids of the running processes whose command line names this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(out) in command:
            found.append(int(entry.name))
    return found


def wait_for(condition, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def steps_done(out):
    return len(read_metrics(out)) if (out / "metrics.jsonl").exists() else 0


def weights(out, step):
    files = open_item(out / "checkpoints" / f"step_{step:08}", "params")
    return {key: files.read(key) for key in files.rows}


def test_a_two_process_run_starts_its_processes_itself_and_leaves_none(tmp_path):
    code, printed = finish(start("--config", "dense-dp2", *TINY, "--steps", "3", "--out", tmp_path / "out"))
    assert code == 0 and printed.count("step 3 ") == 1, printed
    assert not processes_of(tmp_path / "out")


@pytest.mark.slow
def test_a_two_process_run_equals_that_of_torchrun(tmp_path):
    settings = ["--config", "dense-dp2", *TINY, "--steps", "3", "--deterministic"]
    for name, launcher in {"own": (), "torchrun": (*TORCHRUN[1:], "--standalone", "--nproc-per-node", "2")}.items():
        code, printed = finish(start(*settings, "--out", tmp_path / name, launcher=(sys.executable, *launcher)))
        assert code == 0, printed
        assert not processes_of(tmp_path / name)
    one, other = weights(tmp_path / "own", 3), weights(tmp_path / "torchrun", 3)
    assert all(torch.equal(leaf, other[key]) for key, leaf in one.items())


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_refused_with_the_equation(tmp_path):
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "3")
    code, printed = finish(start("--config", "dense-dp2", *TINY, "--out", tmp_path / "out", launcher=torchrun))
    assert code != 0 and "started 3 processes" in printed, printed
    assert "mesh.dp-shard (2) x mesh.cp (1) x mesh.tp (1) = 2" in printed, printed
    assert not (tmp_path / "out").exists() and not processes_of(tmp_path / "out")


def test_ctrl_c_saves_on_all_ranks_and_leaves_no_process(tmp_path):
    out = tmp_path / "out"
    run = start("--config", "dense-dp2", *TINY, *FOREVER, "--out", out)
    wait_for(lambda: steps_done(out) >= 2)
    assert len(processes_of(out)) == 3  # the launcher and two workers
    run.send_signal(signal.SIGINT)
    code, printed = finish(run)
    assert code == 1 and "interrupted" in printed, printed
    assert "Traceback" not in printed, printed
    path, skipped = checkpoint.newest(out / "checkpoints")
    assert path is not None and not skipped
    assert json.loads((path / "state.json").read_text())["step"] == read_metrics(out)[-1]["step"]
    assert not processes_of(out)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["they are just born", "they train"])
def test_workers_end_when_their_launcher_is_killed(tmp_path, when):
    out = tmp_path / "out"
    run = start("--config", "dense-dp2", *TINY, *FOREVER, "--out", out)
    wait_for(lambda: steps_done(out) >= 1 if when == "they train" else len(processes_of(out)) == 3)
    run.kill()
    run.wait()
    wait_for(lambda: not processes_of(out), seconds=60)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_an_error(tmp_path):
    out = tmp_path / "out"
    run = start("--config", "dense-dp2", *TINY, *FOREVER, "--out", out)
    wait_for(lambda: steps_done(out) >= 1)
    os.kill(max(processes_of(out)), signal.SIGKILL)
    code, printed = finish(run)
    assert code == 1, printed
    assert not processes_of(out)


@pytest.mark.slow
def test_two_agents_of_torchrun_make_one_run(tmp_path):
    """As on two machines: each agent starts its own processes, and they meet at one endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--config", "moe-ep2", *TINY, "--model.moe-intermediate-size", "16", "--steps", "3"]
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1".split()
    torchrun = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting)
    agents = [start(*settings, "--out", tmp_path / "out", launcher=torchrun) for _ in range(2)]
    for code, printed in [finish(agent) for agent in agents]:
        assert code == 0, printed
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2, 3]
    assert not processes_of(tmp_path / "out")


GRIDS = {
    "moe-ep2": [],
    "dsa-cp2": [],
    "glm5-dp2-ep2": [],
    "glm5-cp2-ep2": [],
    "moe-tiny": ["--mesh.dp-replicate", "2", "--mesh.dp-shard", "2", "--mesh.ep", "2"],
    "glm5-tiny": ["--mesh.dp-shard", "2", "--mesh.cp", "2", "--mesh.ep", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_a_run_killed_on_any_grid_goes_on_with_the_bits_of_one_that_was_not(name, tmp_path):
    sizes = ["--data.seq-len", "64", "--data.global-batch", "4", "--data.micro-batch", "1", "--data.held-out", "0"]
    settings = ["--config", name, *GRIDS[name], *sizes, "--steps", "20", "--checkpoint.every", "4"]
    code, printed = finish(start(*settings, "--out", tmp_path / "straight"), 900)
    assert code == 0, printed
    out = tmp_path / "killed"
    run = start(*settings, "--out", out)
    wait_for(lambda: steps_done(out) >= 10, seconds=900)
    os.kill(max(processes_of(out)), signal.SIGKILL)
    code, printed = finish(run)
    assert code == 1 and not processes_of(out), printed
    code, printed = finish(start(*settings, "--out", out, "--resume", "auto"), 900)
    assert code == 0 and "resuming" in printed, printed
    one, other = weights(tmp_path / "straight", 20), weights(out, 20)
    assert all(torch.equal(leaf, other[key]) for key, leaf in one.items())
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    records = [
        [[record[key] for key in names] for record in read_metrics(path)] for path in (tmp_path / "straight", out)
    ]
    assert records[0] == records[1]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["safetensors", "tensorstore"])
def test_runs_killed_at_random_moments_of_saving_lose_nothing_but_the_unfinished_step(tmp_path, store):
    settings = ["--config", "dense-dp2", *TINY, "--checkpoint.every", "1", "--deterministic"]
    settings += ["--checkpoint.store", store, "--steps", "150"]
    code, printed = finish(start(*settings, "--out", tmp_path / "straight"), 600)
    assert code == 0, printed
    out, kills, torn, moments = tmp_path / "killed", 0, 0, random.Random(7)
    while kills < 50:
        before = steps_done(out)
        run = start(*settings, "--out", out, "--resume", "auto")
        wait_for(lambda before=before, run=run: steps_done(out) > before or run.poll() is not None)
        assert run.poll() is None, "the run ended before it was killed often enough"
        time.sleep(moments.uniform(0, 0.3))
        victims = processes_of(out)
        for victim in victims if kills % 2 else victims[-1:]:
            os.kill(victim, signal.SIGKILL)
        kills += 1
        finish(run)
        wait_for(lambda: not processes_of(out), seconds=70)
        torn += any((out / "checkpoints").glob(".step_*"))
        path, skipped = checkpoint.newest(out / "checkpoints")
        # One may have been in the making, and the step that ended with it is on record.
        assert not skipped and (checkpoint.number(path) if path else 0) >= steps_done(out) - 2
    code, printed = finish(start(*settings, "--out", out, "--resume", "auto"), 600)
    assert code == 0, printed
    print(f"{store}: {kills} kills survived, {torn} of them in the midst of a save")
    one, other = weights(tmp_path / "straight", 150), weights(out, 150)
    assert all(torch.equal(leaf, other[key]) for key, leaf in one.items())
    losses = [[record["loss"] for record in read_metrics(path)] for path in (tmp_path / "straight", out)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_group_that_loses_a_process_starts_again_twenty_times_of_twenty(tmp_path):
    settings = ["--config", "dense-dp2", *TINY, "--checkpoint.every", "2", "--deterministic", "--steps", "120"]
    code, printed = finish(start(*settings, "--out", tmp_path / "straight"), 600)
    assert code == 0, printed
    out = tmp_path / "killed"
    log = (tmp_path / "log").open("w")
    run = start(*settings, "--out", out, "--max-restarts", "20", into=log)
    for n in range(20):
        before = steps_done(out)
        wait_for(lambda before=before: steps_done(out) > max(before, 2))
        workers = [pid for pid in processes_of(out) if pid != run.pid]
        os.kill(workers[n % 2], signal.SIGKILL)
        wait_for(lambda workers=workers: not set(workers) & set(processes_of(out)), seconds=120)
    code, _ = finish(run, 600)
    log.close()
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed
    assert [f"restart {n}: " in printed for n in range(1, 21)] == [True] * 20, printed
    one, other = weights(tmp_path / "straight", 120), weights(out, 120)
    assert all(torch.equal(leaf, other[key]) for key, leaf in one.items())
    assert not processes_of(out)
