"""Frames of numpy arrays as Levanter's examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import numpy as np
from levanter.data.text.examples import GrugLmExample
from levanter.grug.attention import AttentionMask as GrugAttentionMask
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample


class ExampleBuilder:
    """Turns the rows of frames into examples without building named arrays row by row.

    One example is built by Levanter's own constructors. All others are its tree with the row's numpy arrays as leaves.
    """

    def __init__(self, Pos: hax.Axis, example: Callable[..., Any]) -> None:
        """`example(tokens, loss_weight, segment_ids)` builds one example from arrays of shape (Pos.size,)."""
        number = np.arange(3, dtype=np.int32)[:, None].repeat(Pos.size, axis=1)
        leaves, self._tree = jax.tree.flatten(example(number[0], number[1].astype(np.float32), number[2]))
        self._column = [int(leaf[0]) for leaf in leaves]
        """For every leaf of an example, the array it is: 0 tokens, 1 loss weights, 2 segment ids."""

    def __call__(self, tokens: np.ndarray, loss_mask: np.ndarray, segment_ids: np.ndarray) -> list[Any]:
        """The rows of three arrays (n, Pos.size), as n examples."""
        columns = (tokens, loss_mask.astype(np.float32), segment_ids)
        build = self._tree.unflatten
        return [build(leaves) for leaves in zip(*(columns[i] for i in self._column), strict=True)]


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
