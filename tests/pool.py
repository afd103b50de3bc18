"""Processes in one gloo group, kept alive between tests, under a watchdog."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class Pool:
    """`pool(function, *args)` calls a module-level function on every rank and returns the results by rank.

    An exception on any rank, or no answer in `timeout` seconds, ends all processes and fails the test.
    """

    def __init__(self, world):
        context = multiprocessing.get_context("spawn")
        self.directory = tempfile.TemporaryDirectory()
        store = Path(self.directory.name) / "store"
        self.links, self.processes = [], []
        for rank in range(world):
            link, other = context.Pipe()
            process = context.Process(target=serve, args=(other, f"file://{store}", rank, world), daemon=True)
            process.start()
            self.links.append(link)
            self.processes.append(process)
        self.alive = True

    def __call__(self, function, *args, timeout=120):
        for link in self.links:
            link.send_bytes(pickle.dumps((function, args)))
        deadline = time.monotonic() + timeout
        results = []
        for rank, link in enumerate(self.links):
            try:
                if not link.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} did not answer in {timeout} s")
                result, failure = pickle.loads(link.recv_bytes())
            except (TimeoutError, EOFError, OSError) as error:
                self.stop()
                raise AssertionError(f"{function.__name__}: rank {rank}: {error!r}") from error
            if failure:
                self.stop()
                raise AssertionError(f"{function.__name__}: rank {rank}:\n{failure}")
            results.append(result)
        return results

    def stop(self):
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.directory.cleanup()


def serve(link, store, rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    while True:
        function, args = pickle.loads(link.recv_bytes())
        try:
            answer = (function(*args), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        link.send_bytes(pickle.dumps(answer))
