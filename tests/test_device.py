import pytest
import torch

from niels_gpt.device import get_device, multiplies_bf16, resolve_device


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


@pytest.mark.parametrize("has_amx", [False, True])
def test_bf16_pays_where_the_hardware_multiplies_it(monkeypatch, has_amx):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert multiplies_bf16("cpu") == has_amx
    assert not multiplies_bf16("mps")
