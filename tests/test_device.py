"""The device is the one that is there; an NPU is played by a stand-in module."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from glm5fn import mesh
from glm5fn.device import choose, peak_flops, synchronize, widest
from glm5fn.typed import ConfigError


@pytest.fixture
def npu(tmp_path, monkeypatch):
    """A torch_npu package that adds torch.npu when imported, as the real one does; it notes the calls."""
    calls = []
    device = SimpleNamespace(
        is_available=lambda: True,
        set_device=lambda index: calls.append(("set_device", index)),
        synchronize=lambda: calls.append(("synchronize",)),
        get_device_name=lambda: "Ascend",
    )
    (tmp_path / "torch_npu.py").write_text("import torch\nfrom stand_in_npu import device\ntorch.npu = device\n")
    monkeypatch.setitem(sys.modules, "stand_in_npu", SimpleNamespace(device=device))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "npu", device, raising=False)  # so that it is taken away again
    monkeypatch.delattr(torch, "npu")
    yield calls
    sys.modules.pop("torch_npu", None)
    if hasattr(torch, "npu"):
        del torch.npu


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto") == "cpu"


def test_auto_takes_cuda_before_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose("auto") == "cuda" and choose("cpu") == "cpu"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device \(cuda\) must be one that this machine has: cpu"):
        choose("cuda")
    with pytest.raises(ConfigError, match="torch_npu package"):
        choose("npu")


def test_auto_takes_an_npu_first_and_speaks_hccl_on_it(npu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose("auto") == choose("npu") == "npu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    backends = []
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 3, 4)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    mesh.start("npu")
    synchronize("npu")
    assert backends == ["hccl"] and npu == [("set_device", 3), ("synchronize",)]
    assert peak_flops("npu", torch.bfloat16) is None and widest("npu") == torch.float32


def test_the_peak_of_a_cpu_is_measured_and_that_of_a_known_accelerator_its_vendors(monkeypatch):
    assert 1e8 < peak_flops("cpu", torch.float32) < 1e14
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert peak_flops("cuda", torch.bfloat16) == 989e12 and peak_flops("cuda", torch.float32) == 67e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an unknown device")
    assert peak_flops("cuda", torch.bfloat16) is None


def test_a_deterministic_run_is_refused_where_there_is_no_fp64(npu, refuse):
    assert "sums in fp64, which npu does not have" in refuse("--deterministic", "--device", "npu")
