"""Frames of numpy arrays as Levanter's examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import numpy as np
from levanter.data.text.examples import GrugLmExample
from levanter.grug.attention import AttentionMask as GrugAttentionMask
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

Copy = Callable[[Sequence[np.ndarray]], Any]
"""Builds a part of an example from the arrays of a row: (tokens, loss weights, segment ids)."""


class ExampleBuilder:
    """Turns the rows of arrays into examples without a call of Levanter's constructors for each row.

    One example is built by the constructors. All others are copies of its objects, with the numpy arrays of the row in
    place of the arrays of the first. (Rebuilding the tree with `jax.tree.unflatten` takes four times as long.)
    """

    def __init__(self, Pos: hax.Axis, example: Callable[..., Any]) -> None:
        """`example(tokens, loss_weight, segment_ids)` builds one example from arrays of shape (Pos.size,)."""
        numbers = np.arange(3, dtype=np.int32)[:, None].repeat(Pos.size, axis=1)
        arrays = numbers[0], numbers[1].astype(np.float32), numbers[2]
        first = example(*arrays)
        self._copy = _copier(first) or _constant(first)
        if jax.tree.structure(self._copy(arrays)) != jax.tree.structure(first):
            raise TypeError(f"a copy of {type(first).__name__} has another structure: Levanter's class has changed")

    def __call__(self, tokens: np.ndarray, loss_mask: np.ndarray, segment_ids: np.ndarray) -> list[Any]:
        """The rows of three arrays (n, Pos.size), as n examples."""
        rows = zip(tokens, loss_mask.astype(np.float32), segment_ids, strict=True)
        return [self._copy(row) for row in rows]


def _copier(node: Any) -> Copy | None:
    """A function that copies a part of the first example; None for a part without arrays, which all examples share."""
    if isinstance(node, np.ndarray | jax.Array):
        number = int(node[0])  # which of the three it is: the first example is filled with its numbers
        return lambda row: row[number]
    if isinstance(node, tuple):
        parts = [_copier(part) or _constant(part) for part in node]
        return lambda row: tuple([part(row) for part in parts])
    attributes = getattr(node, "__dict__", {})
    copiers = {name: copier for name, value in attributes.items() if (copier := _copier(value)) is not None}
    if not copiers:
        return None
    kind = type(node)
    shared = {name: value for name, value in attributes.items() if name not in copiers}
    items = list(copiers.items())

    def copy(row: Sequence[np.ndarray]) -> Any:
        new = object.__new__(kind)
        values = new.__dict__
        values.update(shared)
        for name, part in items:
            values[name] = part(row)
        return new

    return copy


def _constant(value: Any) -> Copy:
    return lambda row: value


def named_builder(Pos: hax.Axis) -> ExampleBuilder:
    """A builder of `LmExample`, whose arrays have the axis Pos."""

    def example(tokens: np.ndarray, loss_weight: np.ndarray, segment_ids: np.ndarray) -> LmExample:
        mask = AttentionMask.causal().with_segment_ids(hax.named(segment_ids, Pos))
        return LmExample(tokens=hax.named(tokens, Pos), loss_weight=hax.named(loss_weight, Pos), attn_mask=mask)

    return ExampleBuilder(Pos, example)


def grug_builder(Pos: hax.Axis) -> ExampleBuilder:
    """A builder of `GrugLmExample`: plain arrays, which is what the components of a mixture yield."""

    def example(tokens: np.ndarray, loss_weight: np.ndarray, segment_ids: np.ndarray) -> GrugLmExample:
        mask = GrugAttentionMask.causal().with_segment_ids(segment_ids)
        return GrugLmExample(tokens=tokens, loss_weight=loss_weight, attn_mask=mask)

    return ExampleBuilder(Pos, example)
