"""A GPU with FP8, for the tests that need one."""

import pytest
import torch


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs CUDA with FP8 (Hopper, Ada or later)")
    return torch.device("cuda")
