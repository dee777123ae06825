"""The items of a build: read in batches, counted, hashed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

BATCH_BYTES = 1 << 17
"""Text per batch: enough that the overhead of a batch does not show, few enough that workers share the load."""
BATCH_ITEMS = 1024


class InputBatch(NamedTuple):
    first: int
    """Number of its first item."""
    items: list[Any]
    before: Any
    """The hash of all items before it."""

    def hash_after(self, number: int) -> Any:
        """The hash of all items before it and its first `number`."""
        hashed = self.before.copy()
        hashed.update(b"".join([_bytes(item) for item in self.items[:number]]))
        return hashed


class InputReader:
    """Items one after the other, counted and hashed."""

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, str):
            raise ValueError("expected several items, such as a list; this is one string")
        self._items: Iterator[Any] = iter(items)
        self._number = 0
        self.hash = hashlib.sha256()

    def skip(self, number: int) -> None:
        """Pass over items; they only count for the hash."""
        for item in self._items if number else ():
            self.hash.update(_bytes(item))
            self._number += 1
            if self._number == number:
                break

    def peek(self) -> Any:
        """The hash with the next item, which is still to come; the same hash if there is none."""
        hashed = self.hash.copy()
        for item in self._items:
            hashed.update(_bytes(item))
            self._items = itertools.chain((item,), self._items)
            break
        return hashed

    def at_end(self) -> bool:
        """Whether nothing more comes."""
        return not any(True for _ in self._items)

    def batches(self) -> Iterator[InputBatch]:
        while True:
            batch, size, parts = InputBatch(self._number, [], self.hash.copy()), 0, []
            for item in self._items:
                data = _bytes(item)
                parts.append(data)
                batch.items.append(item)
                size += len(data)
                if size >= BATCH_BYTES or len(batch.items) >= BATCH_ITEMS:
                    break
            if not batch.items:
                return
            self.hash.update(b"".join(parts))  # at once: a call per item would cost as much as the hashing
            self._number += len(batch.items)
            yield batch


def _bytes(item: Any) -> bytes:
    """An item as it is hashed, with kind and length: ("ab", "c") is not ("a", "bc"), and None is not "null"."""
    kind, text = b"text", item
    if not isinstance(item, str):
        kind = b"other"
        try:
            text = json.dumps(item, default=lambda value: dict(value) if isinstance(value, Mapping) else _kind(value))
        except (TypeError, ValueError, RecursionError):  # it is left out in any case
            text = _kind(item)
    data = text.encode("utf-8", errors="surrogatepass")
    return kind + len(data).to_bytes(8, "little") + data


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>"  # not its repr, which may hold an address
