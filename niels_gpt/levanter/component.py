"""Splice data as a component of a mixture, for Levanter's own data config and command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import haliax as hax
from levanter.data.text import DatasetComponentBase, DirectDatasetComponent

from niels_gpt.levanter.configs import SpliceDataConfig, SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig
from niels_gpt.levanter.examples import grug_builder


class _Splits(Mapping[str, Any]):
    """The datasets of a component by split, opened when they are asked for."""

    def __init__(self, component: SpliceComponent) -> None:
        self._component = component

    def __getitem__(self, split: str) -> Any:
        return self._component.open(split)

    def __iter__(self) -> Iterator[str]:
        return iter(("train", "validation") if self._component.eval_examples else ("train",))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True)
class SpliceComponent(SpliceDataConfig, DirectDatasetComponent):
    """Options of both components: those of the splice config of the same name, and the frame length.

    The order comes from `data.shuffle`, as for every component: Levanter's key seeds a new permutation in every epoch.
    """

    seq_len: int | None = None
    """Frame length S; it must be the model's sequence length, which a component cannot see."""
    datasets: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len is None:
            raise ValueError("a splice component needs seq_len: the sequence length of the model")
        if not self.shuffle:
            raise ValueError("a splice component has no shuffle of its own: set data.shuffle, which covers all")
        object.__setattr__(self, "datasets", _Splits(self))

    def open(self, split: str) -> Any:
        """The examples of a split; those of validation are a fixed grid. Raises KeyError for any other split."""
        if split not in list(self.datasets):
            raise KeyError(split)
        Pos = hax.Axis("position", self.seq_len)
        dataset = self.dataset(Pos, builder=grug_builder, shuffle=False)
        return dataset if split == "train" else dataset.grid(self.eval_examples)


@DatasetComponentBase.register_subclass("splice_single_document")
@dataclass(frozen=True)
class SpliceSingleDocumentComponent(SpliceComponent, SpliceSingleDocumentLMConfig):
    """One document at many positions, as a component."""


@DatasetComponentBase.register_subclass("splice_multi_document")
@dataclass(frozen=True)
class SpliceMultiDocumentComponent(SpliceComponent, SpliceMultiDocumentLMConfig):
    """Several documents, as a component."""
