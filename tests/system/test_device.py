"""Devices and the precisions that they support."""

import pytest
import torch

from niels_gpt.system import device
from niels_gpt.system.device import get_device, has_fast_bf16, resolve_device


@pytest.fixture
def machine(monkeypatch):
    """Return a function that fakes the devices of this machine."""

    def fake(*, cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return fake


@pytest.mark.parametrize(("cuda", "mps", "without_cuda"), [(0, False, "cpu"), (0, True, "mps"), (1, False, "cpu")])
def test_auto_is_cuda_then_mps_then_cpu(machine, cuda, mps, without_cuda):
    machine(cuda=cuda, mps=mps)
    assert get_device() == without_cuda
    assert resolve_device("auto") == resolve_device() == ("cuda" if cuda else without_cuda)


def test_an_available_device_is_returned_unchanged(machine):
    machine(cuda=2, mps=True)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert resolve_device(name) == name
    with pytest.raises(ValueError, match="cuda:2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda:0", "mps", "xpu"])
def test_a_missing_device_is_an_error(machine, name):
    machine()
    with pytest.raises(ValueError, match=rf"{name}.*has cpu$"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x"])
def test_an_unknown_device_is_an_error(machine, name):
    machine()
    with pytest.raises(ValueError, match="auto, cpu, cuda or mps"):
        resolve_device(name)


@pytest.mark.parametrize("has_amx", [False, True])
def test_bf16_is_fast_with_hardware_support(monkeypatch, has_amx):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert has_fast_bf16("cpu") == has_amx
    assert not has_fast_bf16("mps")


@pytest.mark.parametrize("known", [True, False])
def test_bf16_on_a_cpu_does_not_change_float32(known, monkeypatch, recwarn):
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


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that fakes a CUDA device with a name and a compute capability."""

    def fake(name="NVIDIA H200", capability=(9, 0), bf16=True):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation)
        monkeypatch.setattr(device, "HAS_TRITON", True)

    return fake


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("Tesla V100", None),
    ],
)
def test_peak_flops_of_the_longest_matching_name(gpu, name, flops):
    gpu(name)
    assert device.peak_flops("cuda") == flops
    assert device.peak_flops("cpu") is None


def test_fast_bf16_on_cuda(gpu):
    gpu(bf16=True)
    assert has_fast_bf16("cuda") and has_fast_bf16("cuda:1")
    gpu(bf16=False)
    assert not has_fast_bf16("cuda")
    assert not device.emulates_bf16("cuda")


@pytest.mark.parametrize(
    ("precision", "where", "gpu_options", "facts"),
    [
        ("tf32", "cpu", {}, "tf32.*cpu"),
        ("tf32", "mps", {}, "tf32.*mps"),
        ("bf16", "cuda", {"name": "Tesla V100", "bf16": False}, "bf16.*Tesla V100.*fp32"),
        ("fp8", "cuda", {"name": "NVIDIA A100", "capability": (8, 0)}, "fp8.*NVIDIA A100.*bf16"),
        ("fp8", "cpu", {}, "fp8.*cpu.*bf16"),
    ],
)
def test_unsupported_precisions(gpu, precision, where, gpu_options, facts):
    gpu(**gpu_options)
    with pytest.raises(ValueError, match=f"train.precision={facts}"):
        device.check_precision(precision, where)


def test_supported_precisions(gpu, monkeypatch):
    gpu(bf16=False)
    device.check_precision("bf16", "cpu")
    device.check_precision("fp32", "cuda")
    gpu(capability=(8, 9))  # the first with fp8
    for precision in ("fp32", "tf32", "bf16", "fp8"):
        device.check_precision(precision, "cuda")
    monkeypatch.setattr(device, "HAS_TRITON", False)
    device.check_precision("bf16", "cuda")
    with pytest.raises(ValueError, match=r"fp8.*Triton"):
        device.check_precision("fp8", "cuda")
