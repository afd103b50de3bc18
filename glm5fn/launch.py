"""Processes: starting local ones through torch's elastic launcher, and ending them together."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .settings import MeshConfig
from .typed import ConfigError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER = "GLM5FN_LAUNCHER"  # in the environment of a process that `launch` started: the id of the one that did


def launched() -> bool:
    """Whether a launcher (ours, or torchrun) started this process as one of a group."""
    return "RANK" in os.environ


def refuse_count(mesh: MeshConfig) -> None:
    """Raise ConfigError if a launcher started another number of processes than a grid has ranks."""
    started = os.environ.get("WORLD_SIZE", str(mesh.world))
    if started != str(mesh.world):
        raise ConfigError(
            f"the launcher started {started} processes, the mesh needs mesh.dp-replicate ({mesh.dp_replicate}) x "
            f"mesh.dp-shard ({mesh.dp_shard}) x mesh.cp ({mesh.cp}) x mesh.tp ({mesh.tp}) = {mesh.world}: "
            "start as many, or change the mesh"
        )


def restarts() -> int:
    """How often the group of this process has been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if launched() else 0


def launch(script: str, argv: Sequence[str], processes: int, max_restarts: int = 0) -> int:
    """Run `script` in this many local processes; the exit code is 0 if all of them ended well, else 1.

    If one fails, all are started again, up to `max_restarts` times.
    Ctrl-C and SIGTERM are passed on, and the processes get a minute to save. None outlives the launcher.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torch.set_num_threads(int(threads))
    os.environ[LAUNCHER] = str(os.getpid())
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            max_restarts=max_restarts,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            shutdown_timeout=60,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-u", script, *argv)
        except (ChildFailedError, SignalException):
            return 1
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


def end_with_launcher(interval: float = 1.0) -> None:
    """End this process at once when its launcher is gone, be it gone already, since nobody else would."""
    parent = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag, which a run reads between steps; a second one ends the process."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interrupt":
        self.handlers = {number: signal.signal(number, self.ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not launched():
            raise KeyboardInterrupt
        self.asked = True
