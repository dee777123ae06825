"""OpenAssistant oasst1: trees of messages; each path from root to leaf is a conversation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.drops import Drops, is_text
from niels_gpt.data.reading.hub import HubReader, HubRequest
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.types import ChatMessage, ChatSample, Role

DATASET_ID = "OpenAssistant/oasst1"
ROLES: dict[str, Role] = {"prompter": "user", "assistant": "assistant"}
COLUMNS = ("message_id", "parent_id", "message_tree_id", "role", "text", "lang")

Message = tuple[str, Role, str, "str | None"]  # id, role, stripped text, language


def iter_oasst1_sft(
    *,
    split: str = "train",
    seed: int = 42,
    shuffle_trees: bool = True,
    take_trees: int | None = None,
    english_only: bool = True,
    max_messages: int = 32,
    path: str | Path | None = None,
    stats: dict[str, int] | None = None,
) -> Iterator[ChatSample]:
    """Yield the conversations of all trees, tree by tree; at most `take_trees` trees, counting those with a kept root.

    meta: `message_tree_id`, `leaf_message_id`, `message_ids`, and `lang` if the root has one. Dropped messages and
    threads are counted in `stats`. Raises DataUnavailable (a ValueError) if the rows cannot be read.
    """
    check_take(take_trees, "take_trees")
    _check_length(max_messages)
    reader = HubReader(HubRequest(DATASET_ID, None, split, path=path, columns=COLUMNS))
    with Drops("oasst1", stats, unit="message or thread") as drops:
        if take_trees == 0:
            return
        forest = _Forest((row for _, row in reader), english_only=english_only, drops=drops)
        ids = list(forest.trees)
        if shuffle_trees:
            random.Random(seed).shuffle(ids)
        for tree in ids[:take_trees]:
            for sample in forest.threads(tree, max_messages, drops):
                if reader.revision:
                    sample.meta["revision"] = reader.revision
                yield sample


def reconstruct_threads(
    records: Iterable[Mapping[str, Any]],
    *,
    english_only: bool = True,
    max_messages: int = 32,
    stats: dict[str, int] | None = None,
) -> list[ChatSample]:
    """Return every conversation from a root to a leaf; trees and children are in order of appearance.

    A message that is filtered out (another language, an unknown role) ends its branch at the parent. A thread is
    cut after `max_messages`. Dropped and counted in `stats`: threads with an empty message or with two consecutive
    turns of one role, messages that no root leads to (orphans, cycles), and messages with a duplicate id.
    Time and memory are linear in the number of messages, whatever the shape of the trees.
    """
    _check_length(max_messages)
    with Drops("oasst1", stats, unit="message or thread") as drops:
        forest = _Forest(records, english_only=english_only, drops=drops)
        return [sample for tree in forest.trees for sample in forest.threads(tree, max_messages, drops)]


class _Forest:
    """Messages by parent. `trees` maps tree ids to their kept roots, in order of first appearance."""

    def __init__(self, records: Iterable[Mapping[str, Any]], *, english_only: bool, drops: Drops) -> None:
        trees: dict[str, list[Message]] = {}
        self._children: dict[str, list[Message]] = {}
        seen: set[str] = set()
        for record in records:
            key, parent = record.get("message_id"), record.get("parent_id")
            if not isinstance(key, str) or not isinstance(parent, str | None):
                drops.add("messages without a proper id or parent id")
            elif key in seen:
                drops.add("messages with the id of another")
            else:
                seen.add(key)
                tree = record.get("message_tree_id")
                roots = trees.setdefault(tree if isinstance(tree, str) else key, [])
                message = _message(record, key, english_only, drops)
                if message is not None:
                    (roots if parent is None else self._children.setdefault(parent, [])).append(message)
        self.trees = {tree: roots for tree, roots in trees.items() if roots}
        self._count_unreachable(seen, drops)

    def threads(self, tree: str, max_messages: int, drops: Drops) -> Iterator[ChatSample]:
        """Yield the threads of a tree, depth first. No recursion: a tree may be a million messages deep."""
        path: list[Message] = []
        stack = [(message, 1) for message in reversed(self.trees[tree])]
        while stack:
            message, depth = stack.pop()
            del path[depth - 1 :]
            path.append(message)
            below = self._children.get(message[0]) if depth < max_messages else None
            if below:
                stack += [(child, depth + 1) for child in reversed(below)]
            else:
                problem = _problem(path)
                if problem:
                    drops.add(problem)
                else:
                    yield _sample(tree, path)

    def _count_unreachable(self, seen: set[str], drops: Drops) -> None:
        """Count the messages that no root leads to: cycles, and descendants of a missing parent."""
        reached = [message for roots in self.trees.values() for message in roots]
        linked = 0
        for message in reached:  # grows during the iteration
            below = self._children.get(message[0], ())
            linked += len(below)
            reached.extend(below)
        lost = sum(map(len, self._children.values())) - linked
        missing = {parent for parent in self._children if parent not in seen}
        orphans = [message for parent in missing for message in self._children[parent]]
        for message in orphans:
            orphans.extend(self._children.get(message[0], ()))
        drops.add("messages whose parent is missing", len(orphans))
        drops.add("messages in a cycle or below a left-out one", lost - len(orphans))


def _message(record: Mapping[str, Any], key: str, english_only: bool, drops: Drops) -> Message | None:
    """Return the message of a record; None if it is filtered out."""
    role, lang, text = record.get("role"), record.get("lang"), record.get("text")
    if english_only and lang is not None and lang != "en":
        drops.add("messages in another language")
        return None
    if not isinstance(role, str) or role not in ROLES:
        drops.add("messages with an unknown role")
        return None
    content = text.strip() if isinstance(text, str) and is_text(text) else ""
    return key, ROLES[role], content, lang


def _problem(path: list[Message]) -> str | None:
    """Return the reason to drop a thread, or None."""
    if not all(message[2] for message in path):
        return "threads with an empty message"
    if any(a[1] == b[1] for a, b in itertools.pairwise(path)):
        return "threads with two turns of one role in a row"
    return None


def _sample(tree: str, path: list[Message]) -> ChatSample:
    meta: dict[str, Any] = {
        "message_tree_id": tree,
        "leaf_message_id": path[-1][0],
        "message_ids": [message[0] for message in path],
    }
    if path[0][3] is not None:
        meta["lang"] = path[0][3]
    return ChatSample([ChatMessage(message[1], message[2]) for message in path], "oasst1", meta)


def _check_length(max_messages: int) -> None:
    if max_messages < 1:
        raise ValueError(f"max_messages must be at least 1, got {max_messages}")
