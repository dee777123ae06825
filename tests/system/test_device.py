import pytest
import torch

from niels_gpt.system import device
from niels_gpt.system.device import get_device, has_fast_bf16, resolve_device


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
    assert has_fast_bf16("cpu") == has_amx
    assert not has_fast_bf16("mps")


@pytest.mark.parametrize("known", [True, False])
def test_bf16_on_a_cpu_leaves_float32_as_it_was(known, monkeypatch, recwarn):
    if not known:
        monkeypatch.setattr(device, "_onednn_has_bf16", lambda: False)
    before = torch.backends.mkldnn.enabled
    weight = torch.randn(96, 64, requires_grad=True)
    with device.bf16_autocast("cpu"):
        assert known or not torch.backends.mkldnn.enabled
        made = torch.nn.functional.linear(torch.randn(32, 64), weight)
        assert made.dtype == torch.bfloat16
        made.float().square().mean().backward()
    assert torch.backends.mkldnn.enabled == before
    with device.bf16_autocast("cpu", False):
        assert torch.backends.mkldnn.enabled == before
        assert torch.nn.functional.linear(torch.randn(32, 64), weight).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), device.bf16_autocast("cpu"):
        raise ZeroDivisionError
    assert torch.backends.mkldnn.enabled == before
    assert not [str(warning.message) for warning in recwarn if "mkldnn" in str(warning.message)]
