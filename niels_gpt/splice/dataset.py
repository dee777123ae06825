"""The two splice datasets: spans of one document, or of several."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from niels_gpt.config.checks import check_option_names
from niels_gpt.config.splice import SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig, log
from niels_gpt.splice.base import SHOWN, SpliceDataset
from niels_gpt.splice.documents import ArrayDocuments, CacheDocuments, Documents, OpenCache, select_from_cache

if TYPE_CHECKING:
    from niels_gpt.cache.token_stream import TokenStream


class SpliceDocumentDataset(SpliceDataset):
    """One document at many positions: every example is a span of it (t, length) at an offset s of the frame."""

    def __init__(
        self,
        *,
        S: int,
        doc_tokens: np.ndarray | Sequence[int],
        pad_token_id: int | None,
        eos_token_id: int | None = None,
        content_length: int | None = None,
        content_stride: int | Sequence[int] = 1,
        offset_stride: int | Sequence[int] = 1,
        content_start_mode: str = "coverage_balanced",
        min_copy_len: int = 2,
        alpha: float | Sequence[float] = 0.0,
        mode: str = "splice",
        offset_bound: str = "tight",
        adaptive_k: bool = True,
        offset_jitter: int = 0,
        jitter_mode: str = "uniform",
        seed: int | None = 0,
        documents: Documents | None = None,
        **order_options: Any,
    ) -> None:
        """`documents` replaces doc_tokens. Options as in SpliceSingleDocumentLMConfig; `order_options` are its shuffle
        options, eos_before_span, trailing_segment_zero and dataset_name.

        Raises ValueError for invalid options, and for a dataset without examples.
        """
        super().__init__(
            ArrayDocuments([doc_tokens]) if documents is None else documents,
            S=S,
            content_length=content_length,
            content_stride=content_stride,
            offset_stride=offset_stride,
            content_start_mode=content_start_mode,
            min_copy_len=min_copy_len,
            adaptive_k=adaptive_k,
            mode=mode,
            offset_bound=offset_bound,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            alpha=alpha,
            offset_jitter=offset_jitter,
            jitter_mode=jitter_mode,
            seed=seed,
            balance_mode="by_temperature" if np.any(alpha) else "by_coverage",
            sampler="quota" if np.any(alpha) else "enumerate",
            **order_options,
        )

    def pairs(self, epoch: int = 0) -> np.ndarray:
        """(n, 2): t and s of every example, in enumeration order."""
        return self.triples(epoch)[:, 1:]

    @classmethod
    def from_cache(
        cls,
        cache_dir: str | Path | None = None,
        split: str = "train",
        *,
        S: int,
        doc_index: int | None = None,
        config: SpliceSingleDocumentLMConfig | None = None,
        **options: Any,
    ) -> SpliceDocumentDataset:
        """A document of a token cache (the folder with meta.json), by index or as `config` selects; it stays on disk.

        Without cache_dir, `base` and `dataset_name` of the config name the cache.

        `options` are options of the config and of the class; they override the config. Raises CacheError (a ValueError)
        for a cache that is damaged or has no documents.npy.
        """
        config = config or SpliceSingleDocumentLMConfig()
        selection, options = _split_options(
            cls, config, ({} if doc_index is None else {"doc_index": doc_index}) | options
        )
        config = dataclasses.replace(config, **selection)
        cache = OpenCache(cache_dir, split, config)
        chosen = select_from_cache(config, cache, S)
        documents = CacheDocuments(cache.stream, chosen)
        log_selected(cls.tag, chosen, documents.lengths)
        merged = _with_filler(cache.stream, config.dataset_options() | {"dataset_name": cache.name} | options)
        return cls(S=S, doc_tokens=(), documents=documents, **merged)


class MultiSpliceDocumentDataset(SpliceDataset):
    """Several documents: every example is a span of one of them (doc_idx, t, length) at an offset s of the frame."""

    tag = "multi_splice"

    def __init__(
        self,
        *,
        S: int,
        doc_tokens_list: Sequence[np.ndarray | Sequence[int]],
        doc_metadata: Sequence[dict[str, Any]] | None = None,
        pad_token_id: int | None,
        eos_token_id: int | None = None,
        content_length: int | None = None,
        content_stride: int | Sequence[int] = 1,
        offset_stride: int | Sequence[int] = 1,
        content_start_mode: str = "coverage_balanced",
        min_copy_len: int = 2,
        alpha: float | Sequence[float] = 0.0,
        balance_mode: str = "by_coverage",
        balance_tau: float = 1.0,
        epoch_length: int | None = None,
        adaptive_k: bool = True,
        offset_jitter: int = 0,
        jitter_mode: str = "uniform",
        offset_bound: str = "tight",
        mode: str = "splice",
        sampler: str | None = None,
        doc_weights: Sequence[float] | np.ndarray | None = None,
        groups: str | Sequence[Hashable] | None = None,
        curriculum: int | None = None,
        seed: int | None = 0,
        documents: Documents | None = None,
        **order_options: Any,
    ) -> None:
        """`documents` replaces doc_tokens_list. Options as in SpliceMultiDocumentLMConfig; `order_options` are its
        shuffle options, eos_before_span, trailing_segment_zero and dataset_name. `groups` may be a key of doc_metadata.

        Raises ValueError for invalid options, and for a dataset without examples.
        """
        documents = ArrayDocuments(doc_tokens_list) if documents is None else documents
        self.doc_metadata = doc_metadata
        if doc_metadata is not None and len(doc_metadata) != len(documents.lengths):
            raise ValueError(f"doc_metadata has {len(doc_metadata)} entries for {len(documents.lengths)} documents")
        if sampler is None:
            needs_quotas = (
                balance_mode == "by_temperature"
                or bool(np.any(alpha))
                or any(x is not None for x in (epoch_length, doc_weights, groups))
            )
            sampler = "quota" if needs_quotas else "enumerate"
        super().__init__(
            documents,
            S=S,
            content_length=content_length,
            content_stride=content_stride,
            offset_stride=offset_stride,
            content_start_mode=content_start_mode,
            min_copy_len=min_copy_len,
            adaptive_k=adaptive_k,
            mode=mode,
            offset_bound=offset_bound,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            alpha=alpha,
            balance_mode=balance_mode,
            balance_tau=balance_tau,
            sampler=sampler,
            epoch_length=epoch_length,
            doc_weights=doc_weights,
            groups=self._labels(groups) if isinstance(groups, str) else groups,
            offset_jitter=offset_jitter,
            jitter_mode=jitter_mode,
            curriculum=curriculum,
            seed=seed,
            **order_options,
        )

    def _labels(self, key: str) -> list[Hashable]:
        """Group labels from a key of the metadata."""
        if self.doc_metadata is None or any(key not in entry for entry in self.doc_metadata):
            raise ValueError(f"groups={key!r} must be a key of every doc_metadata entry, or one label per document")
        return [entry[key] for entry in self.doc_metadata]

    @classmethod
    def from_cache(
        cls,
        cache_dir: str | Path | None = None,
        split: str = "train",
        *,
        S: int,
        doc_indices: Sequence[int] | np.ndarray | None = None,
        config: SpliceMultiDocumentLMConfig | None = None,
        **options: Any,
    ) -> MultiSpliceDocumentDataset:
        """Documents of a token cache (the folder with meta.json): `doc_indices`, else those `config` selects, else all.

        Without cache_dir, `base` and `dataset_name` of the config name the cache. The documents stay on disk; only
        spans are read. `options` are options of the class and of the selection
        (`num_docs`, `min_doc_length`, ...); they override the config. `groups` may be a key of the metadata:
        `document`, `source` or `length` (in bins that double). Raises CacheError (a ValueError) for a cache that is
        damaged or has no documents.npy, ValueError for doc_indices beside options that select documents.
        """
        default = SpliceMultiDocumentLMConfig()
        selection, options = _split_options(cls, default, options)
        # An option with its default value selects nothing, except the two that set how many and which.
        requested = [
            name
            for name, value in selection.items()
            if name not in _LOCATING and value is not None
            if value != getattr(default, name) or name in ("num_docs", "doc_select_mode")
        ]
        if config is None and not requested:
            selection = {name: value for name, value in selection.items() if name in _LOCATING}
        selector = dataclasses.replace(config or default, **selection)
        cache = OpenCache(cache_dir, split, selector)
        stream = cache.stream
        lengths = stream.document_lengths()
        if doc_indices is not None:
            if requested:
                raise ValueError(f"doc_indices already selects the documents: drop it, or drop {', '.join(requested)}")
        elif config is not None or requested:
            doc_indices = select_from_cache(selector, cache, S)
        documents = CacheDocuments(stream, np.arange(len(lengths)) if doc_indices is None else doc_indices)
        chosen = documents.indices
        log_selected(cls.tag, chosen, documents.lengths)
        named = ({} if config is None else config.dataset_options()) | {"dataset_name": cache.name}
        merged = _with_filler(stream, named | options)
        if isinstance(merged.get("groups"), str):
            merged.setdefault("doc_metadata", metadata(chosen, documents.lengths, cache.name))
        return cls(S=S, doc_tokens_list=(), documents=documents, **merged)


_LOCATING = ("base", "dataset_name", "tokenizer")
"""Options that name a cache, and select none of its documents."""


def _split_options(
    cls: type[SpliceDataset],
    config: SpliceSingleDocumentLMConfig | SpliceMultiDocumentLMConfig,
    options: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options that name a cache or select documents, options of the dataset). Raises TypeError for unknown ones."""
    fields = [field.name for field in dataclasses.fields(config)]
    check_option_names(f"{cls.__name__}.from_cache", options, [*fields, *cls.option_names()])
    passed_on = {*config.dataset_options(), "pad_token_id", "eos_token_id", "seed"}
    selection = {name: value for name, value in options.items() if name in fields and name not in passed_on}
    return selection, {name: value for name, value in options.items() if name not in selection}


def _with_filler(stream: TokenStream, options: dict[str, Any]) -> dict[str, Any]:
    """The options with a filler token; the default is the EOT of the cache's tokenizer."""
    eot = (stream.meta or {}).get("special_token_ids", {}).get("eot")
    options = {"eos_token_id": eot} | {k: v for k, v in options.items() if k != "eos_token_id" or v is not None}
    if options.get("pad_token_id") is None:
        options["pad_token_id"] = options["eos_token_id"] if options["eos_token_id"] is not None else 0
    return options


def log_selected(tag: str, indices: Sequence[int] | np.ndarray, lengths: np.ndarray) -> None:
    """Log (info) the index and length of the selected documents, at most SHOWN."""
    if log.isEnabledFor(logging.INFO):
        for i, length in itertools.islice(zip(indices, lengths, strict=True), SHOWN):
            log.info("[%s] Selected doc_idx=%d, length=%d", tag, i, length)


def metadata(numbers: Sequence[int] | np.ndarray, lengths: np.ndarray, source: str) -> list[dict[str, Any]]:
    """The keys documents can be grouped by: source, and length in bins that double."""
    return [
        {"document": int(i), "source": source, "length": int(length).bit_length()}
        for i, length in zip(numbers, lengths, strict=True)
    ]
