"""Statistics of a source: counts, lengths, languages, roles and turns. One pass; stores only lengths."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from niels_gpt.data.types import ChatSample, PretrainSample

QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}


class Statistics:
    """Add samples, then read `summary()`."""

    def __init__(self) -> None:
        self.lengths = array("q")
        """Characters per sample; for a chat, of all its messages."""
        self._bytes = 0
        self._languages: Counter[str] = Counter()
        self._roles: Counter[str] = Counter()
        self._role_characters: Counter[str] = Counter()
        self._turns: Counter[int] = Counter()

    def add(self, sample: PretrainSample | ChatSample) -> None:
        """Count a sample."""
        if isinstance(sample, ChatSample):
            texts = [message.content for message in sample.messages]
            self._turns[len(texts)] += 1
            for message in sample.messages:
                self._roles[message.role] += 1
                self._role_characters[message.role] += len(message.content)
        else:
            texts = [sample.text]
        self.lengths.append(sum(map(len, texts)))
        self._bytes += sum(len(text.encode("utf-8")) for text in texts)
        language = sample.meta.get("lang", sample.meta.get("language"))
        if isinstance(language, str):
            self._languages[language] += 1

    def add_all(self, samples: Iterable[PretrainSample | ChatSample]) -> Statistics:
        """Count all samples; return self."""
        for sample in samples:
            self.add(sample)
        return self

    def summary(self) -> dict[str, Any]:
        """Return plain numbers for JSON. A quantile is the length of a real sample (the lower of two)."""
        lengths = np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else np.zeros(0, np.int64)
        result: dict[str, Any] = {
            "samples": len(lengths),
            "characters": int(lengths.sum()),
            "bytes": self._bytes,
            "mean_length": round(float(lengths.mean()), 1) if len(lengths) else None,
            "length_quantiles": {
                name: int(np.quantile(lengths, q, method="lower")) if len(lengths) else None
                for name, q in QUANTILES.items()
            },
        }
        if self._languages:
            result["languages"] = dict(self._languages.most_common())
        if self._turns:
            result["roles"] = {
                role: {"messages": number, "characters": self._role_characters[role]}
                for role, number in self._roles.most_common()
            }
            result["turns"] = {str(turns): number for turns, number in sorted(self._turns.items())}
        return result
