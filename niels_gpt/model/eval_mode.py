"""A model's modes, left as they were found."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.RLock()
_open: dict[torch.nn.Module, int] = {}  # blocks of a model
_training: dict[torch.nn.Module, list[torch.nn.Module]] = {}  # what was in training mode before the first of them


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """No dropout for the block; afterwards every module is in the mode it was in.

    Blocks of one model may overlap, in several threads too: the modes come back when the last has ended.
    """
    with _lock:
        if model not in _open:
            _training[model] = [module for module in model.modules() if module.training]
        _open[model] = _open.get(model, 0) + 1
        if model.training or _training[model]:
            model.eval()
    try:
        yield
    finally:
        with _lock:
            _open[model] -= 1
            if not _open[model]:
                del _open[model]
                for module in _training.pop(model):
                    module.training = True


def at_rest(model: torch.nn.Module) -> bool:
    """Whether a model is in evaluation mode without a block that may end. For who decodes token by token: a block looks
    at every module, 35 microseconds for v0."""
    with _lock:
        return not model.training and model not in _open
