"""Documents for splice data: from Levanter's caches, or from the token caches of this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer

from niels_gpt.cache.formats import CacheError
from niels_gpt.config import RunConfig
from niels_gpt.config.splice import SpliceConfig
from niels_gpt.splice.documents import ArrayDocuments, Documents
from niels_gpt.tokenizer import text_bytes
from niels_gpt.training.tasks.documents import open_documents


class DocumentSource(Protocol):
    """All documents of one dataset. Lengths are known; tokens are read of the chosen documents only."""

    name: str
    lengths: np.ndarray
    """(N,) int64: tokens of each document."""
    ends: np.ndarray
    """(N,) int64: where each document ends in the stream of all."""
    vocabulary: int
    filler: dict[str, int]
    """Default pad_token_id and eos_token_id, if the tokenizer has them."""

    def read(self, indices: Sequence[int]) -> Documents:
        """The documents with these indices, for a splice dataset. Raises ValueError for ids past the vocabulary."""

    def text(self, index: int) -> bytes:
        """The text of a document, as utf-8."""


class LevanterDocuments:
    """Documents of a Levanter cache. The chosen ones are held in memory."""

    def __init__(self, cache: TreeCache[dict], name: str, tokenizer: MarinTokenizer) -> None:
        self._array = cache.jagged_array_tree()["input_ids"]
        offsets = np.array(self._array.offsets[: self._array.num_rows + 1].read().result(), dtype=np.int64)
        offsets[0] = 0  # the store keeps its number of rows there
        self.name, self._tokenizer, self.vocabulary = name, tokenizer, len(tokenizer)
        self._starts, self.ends = offsets[:-1], offsets[1:]
        self.lengths = self.ends - self._starts
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        pad = next((token for token in (pad, eos) if token is not None), 0)
        self.filler = {"pad_token_id": pad} | ({} if eos is None else {"eos_token_id": eos})

    def _ids(self, index: int) -> np.ndarray:
        return np.asarray(self._array.data[int(self._starts[index]) : int(self.ends[index])].read().result())

    def read(self, indices: Sequence[int]) -> Documents:
        documents = [self._ids(i) for i in indices]
        for i, ids in zip(indices, documents, strict=True):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary:
                raise ValueError(
                    f"document {i} of {self.name} has ids {ids.min()}..{ids.max()}, but the tokenizer has "
                    f"{self.vocabulary} ids: the cache was built with another one"
                )
        return ArrayDocuments(documents)

    def text(self, index: int) -> bytes:
        return self._tokenizer.decode(self._ids(index).tolist()).encode("utf-8")


class TokenCacheDocuments:
    """Training documents of a token cache of this project. They stay on disk; only spans are read."""

    def __init__(self, folder: str, name: str | None) -> None:
        """Raises CacheError (a ValueError) if the folder has no such cache, or not one alone if no name is given."""
        splice = SpliceConfig(base=folder, dataset_name=name, documents="tokens")
        try:
            source = open_documents(RunConfig(task="splice", splice=splice))
        except CacheError as err:
            raise CacheError(str(err).replace("data.token_cache", "data.base.path")) from None
        self._tokenizer, self._documents = source.tokenizer, source.train
        self.name, self.vocabulary = source.source, source.tokenizer.vocab_size
        self.lengths, self.ends = source.train.lengths, source.train.ends
        eot = source.tokenizer.special_token_ids().get("eot")
        self.filler = {"pad_token_id": 0} if eot is None else {"pad_token_id": eot, "eos_token_id": eot}

    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The text of each id, as utf-8; None for a special token."""
        special = set(self._tokenizer.special_token_ids().values())
        return tuple(None if i in special else data for i, data in enumerate(self._tokenizer.token_bytes))

    def read(self, indices: Sequence[int]) -> Documents:
        return self._documents.documents(indices)

    def text(self, index: int) -> bytes:
        return text_bytes(self._tokenizer, self._documents.ids(index))
