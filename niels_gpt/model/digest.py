"""A hash of the weights of a model: whether an audit, or the adapters of LoRA, belong to these weights."""

from __future__ import annotations

import torch
import xxhash

from niels_gpt.model.gpt import GPT


def weights_digest(model: GPT) -> str:
    """Return a hash of the names and bytes of all weights, the same on every device."""
    hashed = xxhash.xxh3_128()
    for name, weight in model.state_dict().items():
        hashed.update(name.encode("utf-8"))
        data = weight.detach().cpu().contiguous()
        hashed.update(data.flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()
