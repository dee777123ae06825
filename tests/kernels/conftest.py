"""The GPUs that some tests need."""

import pytest
import torch


@pytest.fixture
def hopper(cuda):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs CUDA with FP8 (Hopper, Ada or later)")
    return cuda
