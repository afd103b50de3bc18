"""What all tests share."""

import re

import pytest
import torch
from pool import Pool
from training import train


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the tests against transformers run: cpu, cuda or npu")


@pytest.fixture
def device(request):
    return request.config.getoption("--device")


@pytest.fixture
def two_threads():
    """Two threads, where a race of two would show."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pools():
    """`pools(world)` gives a group of so many processes, started once and kept for all tests."""
    started: dict[int, Pool] = {}

    def pool(world):
        if world not in started or not started[world].alive:
            started[world] = Pool(world)
        return started[world]

    yield pool
    for one in started.values():
        one.stop()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Tests that need the pools run in one test process, so that the pools are started once."""
    for item in items:
        if "pools" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("pools"))


def pytest_configure():
    """One thread, as in the processes of a pool, whose bits tests expect; and several would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """`refuse(*argv)`: what train.py said when it refused with exit code 2, started no process and wrote no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("train.train", lambda *_, **__: pytest.fail("the run was started"))

    def refuse(*argv):
        before = sorted(tmp_path.rglob("*"))
        assert train(*argv) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())

    return refuse
