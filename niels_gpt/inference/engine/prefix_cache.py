"""Keys and values of tokens that were read before, so that a prompt with the same beginning is not computed again.

They are stored in a radix tree: a node holds a run of tokens, and the path from the root to it spells a prefix. Texts
that begin alike share the nodes of what they share.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import torch

from niels_gpt.model.gpt import GPT


class _Node:
    """A run of tokens, their keys and values (L, 2, G, n, D), and the runs that continue it by their first token."""

    def __init__(self, ids: Sequence[int], kv: torch.Tensor | None, parent: _Node | None) -> None:
        self.ids = ids
        self.kv = kv
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixCache:
    """Keys and values of up to `limit` tokens; the least recently used are dropped.

    It serves one model, and forgets everything when the model's weights have changed. One thread at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Tokens that are stored."""
        self._root = _Node((), None, None)
        # Each leaf once, with the time of a use that may not be its last. A search of the tree for every leaf that is
        # dropped would take seconds for a long prompt after thousands of prompts that differ in few tokens.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._numbers = itertools.count()  # the order of equal times
        self._clock = 0
        self._weights: object = None

    def clear(self) -> None:
        """Forget everything."""
        self._root, self._leaves, self.size = _Node((), None, None), [], 0

    def check_weights(self, model: GPT) -> None:
        """Forget everything if the weights have moved or changed since the last call."""
        # Every change in place counts up `_version`; inference tensors have none.
        weights = [(p.data_ptr(), p.device, p.dtype, 0 if p.is_inference() else p._version) for p in model.parameters()]
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def match(self, ids: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Return the length of the longest stored prefix of `ids`, and its keys and values, (L, 2, G, n, D) each."""
        found, node, parts = 0, self._root, []
        self._clock += 1
        while found < len(ids) and (child := node.children.get(ids[found])) is not None:
            assert child.kv is not None
            child.used = self._clock
            n = common_length(child.ids, ids, found)
            found += n
            if n < len(child.ids):
                parts.append(child.kv.narrow(3, 0, n))
                break
            parts.append(child.kv)
            node = child
        return found, parts

    def insert(self, ids: Sequence[int], kv: Callable[[int, int], torch.Tensor]) -> None:
        """Store the tokens of `ids` that are not stored yet; kv(start, end) returns a copy of their keys and values."""
        ids, found, node = ids[: self.limit], 0, self._root
        self._clock += 1
        while found < len(ids) and (child := node.children.get(ids[found])) is not None:
            n = common_length(child.ids, ids, found)
            found += n
            if n < len(child.ids) and found < len(ids):
                child = self._split(child, n)
            child.used = self._clock
            node = child
        if found == len(ids):
            return
        leaf = node.children[ids[found]] = _Node(ids[found:], kv(found, len(ids)), node)
        leaf.used = self._clock
        self.size += len(leaf.ids)
        self._add_leaf(leaf)
        while self.size > self.limit:
            self._drop_oldest()

    def _split(self, node: _Node, n: int) -> _Node:
        """Divide a node after n tokens; return the first half, whose only child is the second."""
        assert node.kv is not None and node.parent is not None
        # Copies, not views: a view would keep the memory of both halves.
        first = _Node(node.ids[:n], node.kv.narrow(3, 0, n).clone(), node.parent)
        node.parent.children[first.ids[0]] = first
        node.ids, node.kv = node.ids[n:], node.kv.narrow(3, n, len(node.ids) - n).clone()
        first.used, first.children, node.parent = node.used, {node.ids[0]: node}, first
        return first

    def _add_leaf(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.used, next(self._numbers), node))

    def _drop_oldest(self) -> None:
        """Drop the least recently used leaf."""
        while True:
            used, _, node = heapq.heappop(self._leaves)
            if node.children:
                continue  # no leaf any more
            if node.used == used:
                break
            self._add_leaf(node)  # it was used again
        parent = node.parent
        assert parent is not None
        del parent.children[node.ids[0]]
        self.size -= len(node.ids)
        if not parent.children and parent is not self._root:
            self._add_leaf(parent)


def common_length(run: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """Return how many tokens `run` and ids[start:] have in common at their beginning."""
    if run == ids[start : start + len(run)]:
        return len(run)
    pairs = zip(run, ids[start : start + len(run)], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run), len(ids) - start))
