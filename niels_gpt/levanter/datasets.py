"""The splice datasets as Levanter datasets: same spans, same order, same arrays as `niels_gpt.splice`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import haliax as hax
import jax
import numpy as np
from levanter.data import AsyncDataset
from levanter.models.lm_model import LmExample

from niels_gpt import splice
from niels_gpt.config.splice import count
from niels_gpt.levanter.examples import ExampleBuilder, named_builder
from niels_gpt.splice.base import SpliceDataset


def seed_of(key: Any) -> int:
    """The seed in a JAX key: `PRNGKey(7)` is 7, so that a Levanter run and a torch run can share one seed."""
    seed = 0
    for word in np.asarray(jax.random.key_data(key)).ravel().tolist():
        seed = seed << 32 | word
    return seed


class SpliceExamples(AsyncDataset[LmExample]):
    """The examples of a splice dataset, one epoch after the other.

    Position p holds the example that the torch loop of this project trains on at step p // B, row p % B.
    """

    core_class: type[SpliceDataset]
    """The class of `niels_gpt.splice` that computes spans, order and arrays."""

    def __init__(
        self,
        *,
        Pos: hax.Axis,
        rng_key: Any = None,
        shuffle: bool = False,
        epochs: int | None = 1,
        batch_size: int | None = None,
        builder: Callable[[hax.Axis], ExampleBuilder] = named_builder,
        **options: Any,
    ) -> None:
        """`options` are those of the core class: doc_tokens or doc_tokens_list, pad_token_id, content_length, ...

        `rng_key` seeds the jitter, the streaming sampler and the order. By default the dataset is one epoch in the
        order of enumeration; with `epochs=None` it has no end, and every epoch of a shuffled dataset has a new order. A
        curriculum counts steps of `batch_size` examples and has no end. Raises ValueError as the core class does.
        """
        for name, instead in (("S", "Pos"), ("seed", "rng_key")):
            if name in options:
                raise ValueError(f"{name} comes from {instead}: leave it out")
        self.Pos, self.seed = Pos, 0 if rng_key is None else seed_of(rng_key)
        self.core = type(self).core_class(**{"S": Pos.size, "seed": self.seed, "shuffle": shuffle} | options)
        self._shuffle: bool | None = None
        """Whether `shuffle` was called; None: the options of the core decide."""
        self.epochs = None if epochs is None else count("epochs", epochs)
        self.batch_size = None if batch_size is None else count("batch_size", batch_size)
        if self.core.curriculum is not None and (batch_size is None or epochs is not None):
            raise ValueError(
                "curriculum counts steps, not epochs: it needs one batch size for the whole run, and epochs=None"
            )
        self.build = builder(Pos)

    def is_finite(self) -> bool:
        return self.epochs is not None

    async def async_len(self) -> int:
        """Number of examples of all epochs. Raises ValueError if they have no end."""
        if self.epochs is None:
            raise ValueError("this dataset has no end: set epochs for one that has")
        return len(self.core) * self.epochs

    async def get_batch(self, indices: Sequence[int] | np.ndarray) -> list[LmExample]:
        """The examples at these positions. Raises IndexError for a position outside the dataset."""
        positions = np.asarray(indices, dtype=np.int64)
        if not positions.size:
            return []
        end = None if self.epochs is None else len(self.core) * self.epochs
        if positions.min() < 0 or (end is not None and positions.max() >= end):
            limit = "0 or more" if end is None else f"in 0..{end - 1}"
            raise IndexError(f"positions must be {limit}, got {positions.min()}..{positions.max()}")
        return self.build(*self._arrays(positions))

    def _arrays(self, positions: np.ndarray) -> Sequence[np.ndarray]:
        """(tokens, loss_mask, segment_ids) of the examples at these positions, each (n, S)."""
        if self.core.curriculum is None:
            examples, epochs = self.core.order(self.seed, positions, shuffle=self._shuffle)
            return self.core.get_batch(examples, epochs)[:3]
        assert self.batch_size is not None
        arrays = [np.empty((len(positions), self.core.S), dtype=np.int32) for _ in range(3)]
        steps, rows = np.divmod(positions, self.batch_size)
        for step in np.unique(steps).tolist():
            here = steps == step
            plan = self.core.plan(self.seed, step, self.batch_size, shuffle=self._shuffle)
            plan = plan._replace(indices=plan.indices[rows[here]], epochs=plan.epochs[rows[here]])
            for array, part in zip(arrays, self.core.gather(plan), strict=False):
                array[here] = part
        return arrays

    def shuffle(self, key: Any, *, perm_type: str = "feistel") -> Self:
        """This dataset in the order that the key seeds; every epoch has a new one."""
        shuffled = copy.copy(self)
        shuffled.seed, shuffled._shuffle = seed_of(key), True
        return shuffled

    def block_shuffle(self, *, io_block_size: int, window_blocks: int, key: Any, perm_type: str = "feistel") -> Self:
        """As `shuffle`: every example costs the same to read, so there is no use for blocks."""
        return self.shuffle(key)

    def grid(self, number: int) -> AsyncDataset[LmExample]:
        """A fixed selection: up to so many examples of each document, spread over its spans."""
        quotas = np.array(self.core.quotas)
        spread = [np.arange(n) * quota // n for quota in quotas.tolist() if (n := min(quota, number))]
        firsts = (np.cumsum(quotas) - quotas)[quotas > 0]
        return _Grid(self, np.concatenate([first + s for first, s in zip(firsts, spread, strict=True)]))


class SpliceDocumentDataset(SpliceExamples):
    """One document at many positions of the frame."""

    core_class = splice.SpliceDocumentDataset


class MultiSpliceDocumentDataset(SpliceExamples):
    """Spans of several documents."""

    core_class = splice.MultiSpliceDocumentDataset


class _Grid(AsyncDataset[LmExample]):
    """Given examples of a splice dataset."""

    def __init__(self, dataset: SpliceExamples, examples: np.ndarray) -> None:
        self._dataset, self._examples = dataset, examples

    def is_finite(self) -> bool:
        return True

    async def async_len(self) -> int:
        return len(self._examples)

    async def get_batch(self, indices: Sequence[int] | np.ndarray) -> list[LmExample]:
        chosen = self._examples[np.asarray(indices, dtype=np.int64)]
        return self._dataset.build(*self._dataset.core.get_batch(chosen)[:3])
