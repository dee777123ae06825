"""Evaluation mode for a block of code, after which every module is in its former mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.RLock()
_open: dict[torch.nn.Module, int] = {}  # model -> number of open blocks
_training: dict[torch.nn.Module, list[torch.nn.Module]] = {}  # model -> modules that were in training mode before


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block; afterwards restore the mode of every module.

    Blocks of one model may overlap, also in several threads: the modes are restored when the last one ends.
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


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch off dropout and gradients for the block, then restore the train/eval mode."""
    with evaluating(model), torch.no_grad():
        yield


def at_rest(model: torch.nn.Module) -> bool:
    """Whether a model is in evaluation mode without an open block.

    For code that decodes token by token: opening a block visits every module, 35 microseconds for v0.
    """
    with _lock:
        return not model.training and model not in _open
