"""A naive P(z), one forward pass per token."""

from __future__ import annotations

import copy
import math

import torch

from niels_gpt import GPT


def naive_log_p(model: GPT, window: list[int], prompt: int) -> float:
    """Return log P(z) as a product of softmaxes: the model in float64, one call per token."""
    model = copy.deepcopy(model).double().eval()
    total = 0.0
    with torch.no_grad():
        for i in range(prompt, len(window)):
            logits = model(torch.tensor([window[:i]]))[0, -1]
            total += math.log(torch.softmax(logits, dim=0)[window[i]].item())
    return total
