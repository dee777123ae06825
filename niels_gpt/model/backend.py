"""Which implementation computes a model: plain torch, or kernels for a device and a precision.

`gpt.py` is the reference. A backend replaces its attention branch, its MLP branch and its head by faster code that
computes the same, and hands what it does not support back to the plain operations. It is chosen once, when a model is
prepared (`choose`, `GPT.use_backend`); a model that is just called gets `default_backend`.
"""

from __future__ import annotations

from typing import NamedTuple


class BackendRow(NamedTuple):
    """One implementation and whether it runs here, for `niels-gpt doctor` and the documentation."""

    name: str
    used_for: str
    """Device, precision and use."""
    available: bool
    """Whether it runs on the device that was asked about."""
    reason: str
    """What is missing and how to get it; empty if available."""
    supports: tuple[str, ...]
    """Options it computes itself."""
    declines: dict[str, str]
    """Option -> what happens instead."""


def backend_report(device: str) -> list[BackendRow]:
    """The implementations and whether they run on `device` ("cpu", "cuda", "cuda:1", "mps")."""
    return [BackendRow("plain", "every device", True, "", (), {})]
