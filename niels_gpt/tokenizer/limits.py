"""Bounds on the time and memory that a tokenizer of others may take.

Its numbers of ids and merges, and by how much its rules lengthen a text, are read from the file. What no such check can
find is tried in a process with limits: the rules encode hard texts there, before they are used here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from niels_gpt.system.json_text import check_nesting
from niels_gpt.system.untrusted_files import LimitedProcess, LimitExceeded
from niels_gpt.tokenizer.round_trips import PROBES

MOST_IDS = 1 << 20
"""The largest published vocabularies have 900,000 ids (XLM-V)."""
MOST_MERGES = 600_000
"""Gemma has 580,000, which take 7 s of computing and 0.8 GB."""
MOST_ADDED = 100_000
"""Models of speech add up to 66,000, which take 3 s. Others have fewer than 10,000."""
MOST_GROWTH = 100.0
"""By how much rules may lengthen a text. Llama 2's double it at most: a space in front."""
WORKER = Path(__file__).with_name("limits_worker.py")
_RULES = ("normalizer", "pre_tokenizer", "decoder")
_LISTS = ("normalizers", "pretokenizers", "decoders")
_HARMLESS = frozenset({"ByteLevel", "Digits", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Metaspace"})
"""Types of rules that need no trial, as those of GPT-2 and SmolLM2."""


def number_of_ids(content: Mapping[str, Any]) -> int:
    """Return how many ids a tokenizer.json has, from the largest one."""
    model = content["model"]
    vocabulary = model.get("vocab")
    ids = [i for i in vocabulary.values() if isinstance(i, int)] if isinstance(vocabulary, dict) else []
    ids += [token["id"] for token in _added(content) if isinstance(token.get("id"), int)]
    return max([len(vocabulary) - 1 if isinstance(vocabulary, list) else -1, *ids]) + 1


def check_numbers(ids: int, added: int, merges: int, where: str) -> None:
    """Raise ValueError for numbers of ids, added tokens and merges that would take too long."""
    limits = (("ids", ids, MOST_IDS), ("added tokens", added, MOST_ADDED), ("merges", merges, MOST_MERGES))
    for name, number, most in limits:
        if number > most:
            raise ValueError(f"{where} has {number:,} {name}, more than {most:,}: use another tokenizer")


def check_tokenizer_json(content: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a tokenizer.json that would take too much time or memory."""
    merges = content["model"].get("merges")
    number = len(merges) if isinstance(merges, list) else 0
    check_numbers(number_of_ids(content), len(_added(content)), number, where)
    rules = {name: content.get(name) for name in _RULES}
    try:
        check_nesting(rules)
    except ValueError as err:
        raise ValueError(f"{where} is {err}") from None
    for name in ("normalizer", "decoder"):
        growth = _growth(rules[name])
        if growth > MOST_GROWTH:
            raise ValueError(
                f"{where}: its {name} can make a text {growth:,.0f} times as long, more than {MOST_GROWTH:.0f}"
            )
    steps = [step for name in _RULES[:2] for step in _steps(rules[name])]
    if any(step.get("type") not in _HARMLESS for step in steps):
        _try("tokenizers", json.dumps({**rules, "model": {"type": "BPE", "vocab": {}, "merges": []}}), where)


def try_sentencepiece(data: bytes, where: str) -> None:
    """Raise ValueError for a SentencePiece model that crashes, or takes too much time or memory, on hard texts."""
    _try("sentencepiece", data.hex(), where)


def _try(library: str, model: str, where: str) -> None:
    if problem := _problem(library, model):
        raise ValueError(f"{where} cannot be used: encoding hard texts with it fails: {problem}")


@lru_cache(maxsize=16)
def _problem(library: str, model: str) -> str | None:
    """Return why a library cannot encode hard texts with a model; None if it can, or says itself what is wrong."""
    try:
        process = LimitedProcess(WORKER, library)
        process.ask([model, [*(text for _, text in PROBES), "a" * 1000]])
        process.stop()
    except LimitExceeded as err:
        return str(err)
    return None


def _added(content: Mapping[str, Any]) -> list[Any]:
    added = content.get("added_tokens")
    return [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []


def _steps(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a sequence, in its order. The library knows some by their fields alone."""
    if not isinstance(rule, dict):
        return
    lists = [rule[name] for name in _LISTS if isinstance(rule.get(name), list)]
    if not lists:
        yield rule
    for each in (each for steps in lists for each in steps):
        yield from _steps(each)


def _growth(rule: Any) -> float:
    """Return how many times as long a text of one character can become."""
    growth = 1.0
    for step in _steps(rule):
        growth *= 1.0 + len(str(step.get("prepend", "")))
        if "content" in step and "pattern" in step:
            pattern = step["pattern"]
            found = pattern.get("String") if isinstance(pattern, dict) else None
            content = len(str(step["content"]))
            growth *= max(1.0, content / len(found)) if found else 1.0 + content  # an expression finds empty texts, too
    return growth
