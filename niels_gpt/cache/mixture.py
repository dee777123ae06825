"""Batches from several caches: plan which rows of which cache, then gather them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from niels_gpt.cache.formats import dtype_name
from niels_gpt.config.checks import check_probabilities


class RowDataset(Protocol):
    """The members of a dataset that a mixture needs."""

    dtype: np.dtype
    meta: dict[str, Any] | None

    def plan(self, B: int, generator: torch.Generator | None) -> list[int]: ...
    def gather(self, rows: list[int], /) -> tuple[torch.Tensor, ...]: ...


Dataset = TypeVar("Dataset", bound=RowDataset)


class MixedPlan(NamedTuple):
    """Cache and row of each batch row. The plan is the provenance of a batch."""

    source: list[str]
    """Per row: name of the cache."""
    row: list[int]
    """Per row: window or example of that cache."""


class Mixture(Generic[Dataset]):
    """Datasets of one kind, each drawn with a probability."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float]) -> None:
        """Raises ValueError if the weights do not sum to 1, name an unknown dataset, or mix ids of two tokenizers."""
        check_probabilities(weights, name="weights")
        self.weights = {name: share for name, share in weights.items() if share}
        missing = [name for name in self.weights if name not in datasets]
        if missing:
            raise ValueError(f"weights name {', '.join(missing)}, but the caches are {', '.join(datasets) or 'none'}")
        self.datasets = {name: datasets[name] for name in self.weights}
        _check_dtypes(self.datasets)

    def plan(self, B: int, generator: torch.Generator | None) -> MixedPlan:
        """Draw B rows: one multinomial for the caches, then each cache draws its rows, in the order of the weights."""
        if B < 1:
            raise ValueError(f"B must be at least 1, got {B}")
        names = list(self.weights)
        shares = torch.tensor([self.weights[name] for name in names], dtype=torch.float32)
        drawn = torch.multinomial(shares, B, replacement=True, generator=generator).tolist()
        rows = {
            name: iter(self.datasets[name].plan(drawn.count(i), generator)) if i in drawn else iter(())
            for i, name in enumerate(names)
        }
        source = [names[i] for i in drawn]
        return MixedPlan(source, [next(rows[name]) for name in source])

    def gather(self, plan: MixedPlan) -> tuple[torch.Tensor, ...]:
        """The tensors of the planned rows, in order, on the CPU."""
        gathered: dict[str, tuple[torch.Tensor, ...]] = {}
        positions = {name: [i for i, source in enumerate(plan.source) if source == name] for name in self.weights}
        for name, at in positions.items():
            if at:
                gathered[name] = self.datasets[name].gather([plan.row[i] for i in at])
        some = next(iter(gathered.values()))
        if len(gathered) == 1:
            return some
        merged = [torch.empty((len(plan.row), *rows.shape[1:]), dtype=rows.dtype) for rows in some]
        for name, tensors in gathered.items():
            index = torch.tensor(positions[name])
            for target, rows in zip(merged, tensors, strict=True):
                target.index_copy_(0, index, rows)
        return tuple(merged)

    def get_batch(self, *, B: int, generator: torch.Generator | None) -> tuple[torch.Tensor, ...]:
        """A batch of rows from all datasets, on the CPU; tensors as from the `get_batch` of the datasets."""
        return self.gather(self.plan(B, generator))


def _check_dtypes(datasets: Mapping[str, RowDataset]) -> None:
    """Raise ValueError for datasets of uint16 and of uint32, unless all of them have the same tokenizer."""
    if len({dataset.dtype for dataset in datasets.values()}) < 2:
        return
    tokenizers = {name: (dataset.meta or {}).get("tokenizer_sha256") for name, dataset in datasets.items()}
    if None in tokenizers.values() or len(set(tokenizers.values())) > 1:
        listed = ", ".join(
            f"{name} ({dtype_name(dataset.dtype)}, tokenizer {(tokenizers[name] or 'unknown')[:12]})"
            for name, dataset in datasets.items()
        )
        raise ValueError(
            f"these caches cannot be mixed, their tokenizers differ: {listed}; build them with one tokenizer"
        )
