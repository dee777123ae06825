"""Which precisions a device supports, and its peak speed."""

import pytest
import torch

from niels_gpt.system import device as device_module
from niels_gpt.system.device import check_precision, peak_flops


def test_tf32_needs_cuda():
    with pytest.raises(ValueError, match="tf32"):
        check_precision("tf32", "cpu")
    for precision in ("fp32", "bf16"):
        check_precision(precision, "cpu")


def test_bf16_needs_a_gpu_that_has_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    with pytest.raises(ValueError, match=r"Tesla V100 .*bfloat16.*fp32"):
        check_precision("bf16", "cuda")
    check_precision("fp32", "cuda")


def test_fp8_needs_a_gpu_that_has_it_and_triton(monkeypatch):
    with pytest.raises(ValueError, match=r"fp8.*cpu.*bf16"):
        check_precision("fp8", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"fp8.*NVIDIA A100.*bf16"):
        check_precision("fp8", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(device_module, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"fp8.*Triton.*bf16"):
        check_precision("fp8", "cuda")
    monkeypatch.setattr(device_module, "HAS_TRITON", True)
    check_precision("fp8", "cuda")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("Some New Thing", None),
    ],
)
def test_the_peak_is_that_of_the_longest_matching_name(name, peak, monkeypatch):
    monkeypatch.setattr(device_module.torch.cuda, "get_device_name", lambda device=None: name)
    assert peak_flops("cuda") == peak
    assert peak_flops("cpu") is None
