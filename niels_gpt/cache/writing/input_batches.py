"""Read the input items of a build in batches, counted and hashed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

BATCH_BYTES = 1 << 17
"""Bytes of text per batch: large enough to hide the overhead of a batch, small enough to balance the workers."""
BATCH_ITEMS = 1024


class InputBatch(NamedTuple):
    first: int
    """Index of its first item."""
    items: list[Any]
    before: Any
    """Hash of all items before the batch."""

    def hash_after(self, number: int) -> Any:
        """Hash of all items before the batch and its first `number` items."""
        hashed = self.before.copy()
        hashed.update(b"".join([_bytes(item) for item in self.items[:number]]))
        return hashed


class InputReader:
    """Reads items in order, counts and hashes them."""

    def __init__(self, items: Iterable[Any]) -> None:
        if isinstance(items, str):
            raise ValueError("expected a list of items, got one string")
        self._items: Iterator[Any] = iter(items)
        self._number = 0
        self.hash = hashlib.sha256()

    def skip(self, number: int) -> None:
        """Skip `number` items; they are hashed only."""
        for item in self._items if number else ():
            self.hash.update(_bytes(item))
            self._number += 1
            if self._number == number:
                break

    def peek(self) -> Any:
        """The hash including the next item, which is not consumed; the same hash if there is none."""
        hashed = self.hash.copy()
        for item in self._items:
            hashed.update(_bytes(item))
            self._items = itertools.chain((item,), self._items)
            break
        return hashed

    def at_end(self) -> bool:
        """Whether the input has no more items. Consumes the next one."""
        return not any(True for _ in self._items)

    def batches(self) -> Iterator[InputBatch]:
        while True:
            batch, size, encoded = InputBatch(self._number, [], self.hash.copy()), 0, []
            for item in self._items:
                data = _bytes(item)
                encoded.append(data)
                batch.items.append(item)
                size += len(data)
                if size >= BATCH_BYTES or len(batch.items) >= BATCH_ITEMS:
                    break
            if not batch.items:
                return
            self.hash.update(b"".join(encoded))  # once per batch: a call per item costs as much as the hashing
            self._number += len(batch.items)
            yield batch


def _bytes(item: Any) -> bytes:
    """The hashed form of an item, with type and length: ("ab", "c") differs from ("a", "bc"), and None from "null"."""
    kind, text = b"text", item
    if not isinstance(item, str):
        kind = b"other"
        try:
            text = json.dumps(item, default=lambda value: dict(value) if isinstance(value, Mapping) else _kind(value))
        except (TypeError, ValueError, RecursionError):  # the builder drops such an item anyway
            text = _kind(item)
    data = text.encode("utf-8", errors="surrogatepass")
    return kind + len(data).to_bytes(8, "little") + data


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>"  # not the repr, which may contain an address
