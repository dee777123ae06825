import sys

import pytest
import torch

from niels_gpt import device
from niels_gpt.device import get_device, keep_freed_memory, multiplies_bf16, resolve_device


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine with these devices."""

    def pretend(*, cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(("cuda", "mps", "wanted"), [(0, False, "cpu"), (0, True, "mps"), (1, False, "cpu")])
def test_get_device_is_mps_or_cpu(machine, cuda, mps, wanted):
    machine(cuda=cuda, mps=mps)
    assert get_device() == wanted


@pytest.mark.parametrize(
    ("cuda", "mps", "wanted"), [(0, False, "cpu"), (0, True, "mps"), (2, False, "cuda"), (1, True, "cuda")]
)
def test_auto_is_cuda_then_get_device(machine, cuda, mps, wanted):
    machine(cuda=cuda, mps=mps)
    assert resolve_device("auto") == wanted
    assert resolve_device() == wanted


def test_a_device_that_is_there_is_taken_as_it_is(machine):
    machine(cuda=2, mps=True)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert resolve_device(name) == name


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "meta", "xpu"])
def test_a_device_that_is_not_there_is_refused(machine, name):
    machine()
    with pytest.raises(ValueError, match=rf"{name}.*has cpu$"):
        resolve_device(name)


def test_a_gpu_past_the_last_is_refused(machine):
    machine(cuda=2)
    with pytest.raises(ValueError, match="cuda:2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "CPU "])
def test_what_is_no_device_is_refused(machine, name):
    machine()
    with pytest.raises(ValueError, match="auto, cpu, cuda or mps"):
        resolve_device(name)


class FakeLibc:
    def __init__(self):
        self.calls = []

    def mallopt(self, option, value):
        self.calls.append((option, value))
        return 1


def test_freed_memory_is_kept_on_linux(monkeypatch):
    libc = FakeLibc()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    keep_freed_memory.__wrapped__()
    options = dict(libc.calls)
    # M_TRIM_THRESHOLD is -1 and M_MMAP_THRESHOLD is -3 in glibc's malloc.h; 32 MiB is its own upper bound.
    assert options.keys() == {-1, -3}
    assert all(32 * 2**20 < value < 2**31 for value in options.values())  # mallopt takes a C int


@pytest.mark.parametrize("failure", [OSError("no libc.so.6"), AttributeError("mallopt")])
def test_no_glibc_is_no_error(monkeypatch, failure):
    asked = []

    def missing(name):
        asked.append(name)
        raise failure

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", missing)
    keep_freed_memory.__wrapped__()
    assert asked == ["libc.so.6"]


def test_other_systems_are_left_alone(monkeypatch):
    libc = FakeLibc()
    monkeypatch.setattr(device.sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    keep_freed_memory.__wrapped__()
    assert libc.calls == []


@pytest.mark.parametrize("has_amx", [False, True])
def test_bf16_pays_where_the_hardware_multiplies_it(monkeypatch, has_amx):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert multiplies_bf16("cpu") == has_amx
    assert not multiplies_bf16("mps")
