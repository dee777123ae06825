"""Batches from several caches at once: plan which rows of which cache, then gather them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from niels_gpt.config.checks import check_probabilities


class RowDataset(Protocol):
    """What a mixture needs of a dataset."""

    def plan(self, B: int, generator: torch.Generator | None) -> list[int]: ...
    def gather(self, rows: list[int], /) -> tuple[torch.Tensor, ...]: ...


Dataset = TypeVar("Dataset", bound=RowDataset)


class MixedPlan(NamedTuple):
    """Where each row of a batch comes from; the plan is the provenance."""

    source: list[str]
    """Per row: the cache."""
    row: list[int]
    """Per row: the window or example in it."""


class Mixture(Generic[Dataset]):
    """Datasets of one kind, each drawn with its share."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float]) -> None:
        """Raises ValueError where the shares do not sum to 1, or name a dataset that is not there."""
        check_probabilities(weights, name="weights")
        self.weights = {name: share for name, share in weights.items() if share}
        missing = [name for name in self.weights if name not in datasets]
        if missing:
            raise ValueError(f"weights name {', '.join(missing)}, but the caches are {', '.join(datasets) or 'none'}")
        self.datasets = {name: datasets[name] for name in self.weights}

    def plan(self, B: int, generator: torch.Generator | None) -> MixedPlan:
        """Draw B rows: one multinomial for the caches, then each cache draws its rows, in the order of the shares."""
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
        """The tensors of the rows, in their order, on the CPU."""
        parts: dict[str, tuple[torch.Tensor, ...]] = {}
        places = {name: [i for i, source in enumerate(plan.source) if source == name] for name in self.weights}
        for name, at in places.items():
            if at:
                parts[name] = self.datasets[name].gather([plan.row[i] for i in at])
        if len(parts) == 1:
            return next(iter(parts.values()))
        whole = [torch.empty((len(plan.row), *part.shape[1:]), dtype=part.dtype) for part in next(iter(parts.values()))]
        for name, tensors in parts.items():
            index = torch.tensor(places[name])
            for target, part in zip(whole, tensors, strict=True):
                target.index_copy_(0, index, part)
        return tuple(whole)

    def get_batch(self, *, B: int, generator: torch.Generator | None) -> tuple[torch.Tensor, ...]:
        """What the datasets' own `get_batch` gives, over all of them, on the CPU."""
        return self.gather(self.plan(B, generator))
