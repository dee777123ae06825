"""Levanter data configs that choose documents and train on their spans.

The options are the fields of the configs of the same names in `niels_gpt.splice`, plus the tokenizer and the base that
the documents come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import haliax as hax
from draccus import ChoiceRegistry
from levanter.data import AsyncDataset
from levanter.data.text import LmDataConfig
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer

from niels_gpt.config import splice as core
from niels_gpt.levanter.datasets import MultiSpliceDocumentDataset, SpliceDocumentDataset, SpliceExamples
from niels_gpt.levanter.documents import DocumentSource, TokenCacheDocuments
from niels_gpt.levanter.id_tokenizer import temporary_id_tokenizer
from niels_gpt.levanter.sources import (
    ComponentsConfig,
    LMMixtureDatasetConfig,
    SourceConfig,
    TokenCacheConfig,
    TypedData,
    UrlSingleDatasetLMConfig,
    named_caches,
    named_tokenizer,
    open_source,
)
from niels_gpt.splice.dataset import log_selected, metadata
from niels_gpt.splice.documents import choose

_HANDLED = {"base", "dataset_name", "tokenizer"}
"""Fields of the core that this module evaluates; the core sees their defaults."""
_USED = {"tokenizer", "cache_dir", "cache_options", "enforce_eos", "auto_build_caches", "components"}
"""Fields of Levanter's data config that splice data has a use for."""

_UNSET = LmDataConfig()
_ANY_RUN = {"max_train_batches": 1, "initial_batch_size": 1}
"""Where the run is not known yet, or does not matter."""


@dataclass(frozen=True)
class DataConfig(TypedData, LmDataConfig, ChoiceRegistry):
    """What `data` of a run can be."""


DataConfig.register_subclass("components", ComponentsConfig)
DataConfig.register_subclass("mixture", LMMixtureDatasetConfig)
DataConfig.register_subclass("url_single_dataset", UrlSingleDatasetLMConfig)


@dataclass(frozen=True)
class SpliceDataConfig(DataConfig):
    """What the single- and the multi-document config share."""

    core_config: ClassVar[type]
    dataset_class: ClassVar[type[SpliceExamples]]

    base: SourceConfig | None = None
    """Where the documents come from; None: `components` of this config."""
    dataset_name: str | None = None
    """The dataset of the base to choose documents from; None: the only one."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer; None: that of the base."""
    shuffle: bool = True
    """Shuffle the examples of an epoch; otherwise the order of enumeration."""
    max_train_batches: int | None = None
    """Batches that restrict_to_training_subset counts; None: the steps of the run."""
    epochs: int | None = None
    """Passes over the examples; None: no end."""
    eval_examples: int = 16
    """Examples of each document in the validation set: a fixed grid over its spans. 0: no validation set."""

    def __post_init__(self) -> None:
        if isinstance(self.base, str | Path):
            object.__setattr__(self, "base", TokenCacheConfig(path=str(self.base)))
        if (self.base is None) == (not self.components):
            raise ValueError(
                "splice data needs a base with documents: set data.base (or data.components, which is a base too)"
                if self.base is None
                else "data has both base and components: documents come from one of them"
            )
        _refuse_unused(self)
        for name, low in (("epochs", 1), ("eval_examples", 0)):
            if (value := getattr(self, name)) is not None:
                core.count(f"data.{name}", value, low)
        self._selection(**_ANY_RUN)  # checks every option
        if self.epochs is not None and getattr(self, "curriculum", None) is not None:
            raise ValueError("data.epochs and data.curriculum: each new document starts a new epoch, so set only one")
        if self.epochs is not None and self.restrict_to_training_subset and not self._subset_is_set:
            raise ValueError(
                "data.epochs and data.restrict_to_training_subset: the steps depend on the documents, and these on the "
                "steps: set data.max_train_tokens or data.max_train_batches"
            )
        self._name_of_tokenizer()

    def _selection(self, **defaults: int | None) -> Any:
        """The core config with the options of this one; `defaults` are for options that are None."""
        names = {f.name for f in dataclasses.fields(self.core_config)} - _HANDLED
        options = {name: getattr(self, name) for name in names}
        options |= {name: value for name, value in defaults.items() if options[name] is None}
        try:
            return self.core_config(**options)
        except ValueError as err:
            raise ValueError(str(err).replace("splice.", "data.")) from None

    @property
    def _subset_is_set(self) -> bool:
        return any(getattr(self, name) is not None for name in ("max_train_tokens", "max_train_batches"))

    def _name_of_tokenizer(self) -> str | None:
        given, base = self.tokenizer, None if self.base is None else self.base.tokenizer
        if given is not None and base not in (None, _UNSET.tokenizer, given):
            raise ValueError(f"data.tokenizer={given} differs from data.base.tokenizer={base}: documents have one")
        return given if given is not None else base

    @cached_property
    def the_tokenizer(self) -> MarinTokenizer:
        name = self._name_of_tokenizer()
        if name is None and isinstance(self.base, TokenCacheConfig):
            source = TokenCacheDocuments(self.base.path, self.dataset_name)
            name = temporary_id_tokenizer(source.token_bytes(), source.filler.get("eos_token_id"))
        if name is None:
            raise ValueError("data.tokenizer is missing: the name or folder of a Hugging Face tokenizer")
        return named_tokenizer(name)

    @property
    def _source_config(self) -> LmDataConfig:
        return self if self.base is None else self.base

    @cached_property
    def source(self) -> DocumentSource:
        """The documents to choose from. Raises ValueError if there are none."""
        return open_source(self._source_config, self.dataset_name, self.the_tokenizer)

    def build_caches(self, split: str) -> dict[str, TreeCache[dict]]:
        """Levanter's cache of the chosen dataset, by name; empty for the token caches of this project."""
        if isinstance(self.base, TokenCacheConfig):
            return {}
        return named_caches(self._source_config, self.dataset_name, self.the_tokenizer, split)[1]

    def chosen(self, S: int) -> list[int]:
        """Indices of the documents to train on. Raises ValueError if they cannot be chosen."""
        source, config = self.source, self._selection(**self._run)
        try:
            return choose(config, source.lengths, source.ends, S, source.text)
        except ValueError as err:
            raise ValueError(str(err).replace("splice.", "data.")) from None

    @cached_property
    def _run(self) -> dict[str, int]:
        """What restrict_to_training_subset counts if the config does not say: batches, and rows per batch."""
        return {}

    def fit_run(self, *, batch_size: int | None = None, steps: int | None = None) -> None:
        """Set the first batch size and the number of steps of the run, for restrict_to_training_subset."""
        given = {"initial_batch_size": batch_size, "max_train_batches": steps}
        self._run.update({name: value for name, value in given.items() if value is not None})

    def dataset(
        self,
        Pos: hax.Axis,
        *,
        key: Any = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> SpliceExamples:
        """The dataset of the chosen documents; `options` are further options of the dataset class.

        Raises ValueError if the documents cannot be chosen, or give no example.
        """
        source, chosen = self.source, self.chosen(Pos.size)
        documents = source.read(chosen)
        log_selected(self.dataset_class.core_class.tag, chosen, documents.lengths)
        settings = source.filler | self._selection(**_ANY_RUN).dataset_options()
        for name in ("pad_token_id", "eos_token_id"):
            if not 0 <= settings.get(name, 0) < source.vocabulary:
                last = source.vocabulary - 1
                raise ValueError(f"data.{name}={settings[name]} is not a token: the tokenizer has ids 0..{last}")
        settings |= self._documents(documents, chosen) | {"dataset_name": source.name} | options
        epochs = self.epochs if epochs is None else epochs
        return self.dataset_class(Pos=Pos, rng_key=key, epochs=epochs, batch_size=batch_size, **settings)

    def _documents(self, documents: Any, chosen: list[int]) -> dict[str, Any]:
        """The options of the dataset class that pass the documents."""
        return {"doc_tokens": (), "documents": documents}

    def train_set(
        self, Pos: hax.Axis, batch_schedule: BatchSchedule, *, key: Any, epochs: int | None = None
    ) -> SpliceExamples:
        """The training examples: in a new order in every epoch, and without end unless `epochs` are given."""
        sizes = set(batch_schedule.unique_batch_sizes())
        if getattr(self, "curriculum", None) is not None and len(sizes) > 1:
            raise ValueError(f"data.curriculum counts steps of one batch size, but the run has {sorted(sizes)}")
        self.fit_run(batch_size=batch_schedule.batch_size_at_step(0))
        return self.dataset(Pos, key=key, epochs=epochs, batch_size=batch_schedule.batch_size_at_step(0))

    def validation_sets(self, Pos: hax.Axis) -> Mapping[str, AsyncDataset[LmExample]]:
        """A fixed grid of examples of the chosen documents, by the name of their dataset."""
        if not self.eval_examples:
            return {}
        return {self.source.name: self.dataset(Pos, batch_size=1).grid(self.eval_examples)}

    def tagged_eval_sets(self, Pos: hax.Axis) -> list[tuple[AsyncDataset[LmExample], list[str]]]:
        return [(dataset, [name]) for name, dataset in self.validation_sets(Pos).items()]


def _refuse_unused(config: SpliceDataConfig) -> None:
    """Raise ValueError for a field of Levanter's data config that has been set and has no effect on splice data."""
    own = {f.name for f in dataclasses.fields(config.core_config)}
    for f in dataclasses.fields(LmDataConfig):
        if f.name in _USED | own:
            continue
        if getattr(config, f.name) != getattr(_UNSET, f.name):
            raise ValueError(f"data.{f.name} has no effect on splice data: leave it out")


@DataConfig.register_subclass("splice_single_document")
@dataclass(frozen=True)
class SpliceSingleDocumentLMConfig(SpliceDataConfig, core.SpliceSingleDocumentLMConfig):
    """One document at many positions."""

    core_config = core.SpliceSingleDocumentLMConfig
    dataset_class = SpliceDocumentDataset


@DataConfig.register_subclass("splice_multi_document")
@dataclass(frozen=True)
class SpliceMultiDocumentLMConfig(SpliceDataConfig, core.SpliceMultiDocumentLMConfig):
    """Several documents, balanced."""

    core_config = core.SpliceMultiDocumentLMConfig
    dataset_class = MultiSpliceDocumentDataset

    def _documents(self, documents: Any, chosen: list[int]) -> dict[str, Any]:
        described = metadata(chosen, documents.lengths, self.source.name)
        return {"doc_tokens_list": (), "documents": documents, "doc_metadata": described}
