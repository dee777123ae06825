"""Mutations of valid input: text, bytes, JSON values and command lines. Everything is drawn from one generator."""

from __future__ import annotations

import json
import random
from typing import Any

NASTY = (
    "", " ", "\0", "\n", "\r\n", "\t", "0", "-1", "1e999", "nan", "inf", "-inf", "null", "true", "~", "[]", "{}",
    "[[]]", "''",
    "9" * 40, "18446744073709551616", "2147483648", "-9223372036854775809", "0x10", "1_000", "1e-400", "é", "\ufeff",
    "\u2028", "\u202e",
    "\ud7ff", "🙂" * 50, "\x1b[31m", "\x1b]0;x\x07", "a" * 5000, "../..", "/", ".", "..", "/dev/null/x",
    "!!python/object:os.system [x]",
    "&a [*a]", "*a", "<<: *a", "{a: {a: {a: 1}}}", "- " * 200, "[" * 3000, '{"a":' * 3000, "%s%n", "$(x)", "`x`",
    "'", '"', "\\", "---\n",
    "user:", "assistant:", "\n\n<dialogue>\n\n", "<|endoftext|>", "2024-13-45", "=cmd|' /C calc'!A0", "\x85", "\x0b",
)  # fmt: skip
"""Strings that programs stumble over."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**40, 1.5, 1e308, float("nan"), float("inf"), "",
    "x", "0",
    [], [1], [[]], {}, {"a": 1}, "é" * 10, "../../x", "a\nb",
)  # fmt: skip
"""JSON values of the wrong kind or size."""


def mutate_text(text: str, rng: random.Random) -> str:
    """Return the text after one to four small changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        text = _change_text(text, rng)
    return text


def _change_text(text: str, rng: random.Random) -> str:
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.choice((1, 2, 5, 20, 200)))
    lines = text.splitlines(keepends=True)
    way = rng.randrange(9)
    if way == 0:
        return text[:start] + text[end:]
    if way == 1:
        return text[:start] + rng.choice(NASTY) + text[start:]
    if way == 2:
        return text[:start] + rng.choice(NASTY) + text[end:]
    if way == 3:
        return text[:end] + text[start:end] * rng.choice((1, 3, 50)) + text[end:]
    if way == 4:
        return text[:start]
    if way == 5 and len(lines) > 1:
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        return "".join(lines)
    if way == 6 and lines:
        i = rng.randrange(len(lines))
        key, colon, _ = lines[i].partition(":")
        lines[i] = f"{key}{colon} {rng.choice(NASTY)}\n"
        return "".join(lines)
    digits = [i for i, letter in enumerate(text) if letter.isdigit()]
    if way == 7 and digits:
        i = rng.choice(digits)
        return text[:i] + rng.choice(("", "0", "9", "-", ".", "99999999999", "e9")) + text[i + 1 :]
    return (
        text[:start]
        + chr(rng.choice((0, 7, 9, 13, 27, 127, 0x85, 0xA0, 0x2028, 0xFEFF, 0xFFFD, 0x1F600)))
        + text[start:]
    )


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes after one to four changes: set, removed, inserted, cut off or zeroed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 2, 8, 64, 1000))
        way = rng.randrange(6)
        if way == 0:
            changed[start : start + length] = rng.randbytes(length)
        elif way == 1:
            del changed[start : start + length]
        elif way == 2:
            changed[start:start] = rng.randbytes(length)
        elif way == 3:
            del changed[start:]
        elif way == 4:
            changed[start : start + length] = bytes(min(length, len(changed) - start))
        else:
            changed[start : start + length] = b"\xff" * min(length, len(changed) - start)
    return bytes(changed)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one entry replaced, removed, renamed or doubled."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    value = json.loads(json.dumps(value))
    walk(value)
    if not places:
        return rng.choice(VALUES)
    node, key = rng.choice(places)
    way = rng.randrange(4)
    if way == 0:
        del node[key]
    elif way == 1 and isinstance(node, dict):
        node[rng.choice(("", "x", key + "_", "é"))] = node.pop(key)
    elif way == 2 and isinstance(node, list):
        node.insert(key, node[key])
    else:
        node[key] = rng.choice(VALUES)
    return value


def mutate_json_text(text: str, rng: random.Random) -> str:
    """Return JSON (or JSON lines) with changed values, or changed as text."""
    if rng.random() < 0.4:
        return mutate_text(text, rng)
    try:
        return json.dumps(mutate_json(json.loads(text), rng))
    except ValueError:
        lines = text.splitlines()
        i = rng.randrange(len(lines))
        lines[i] = json.dumps(mutate_json(json.loads(lines[i]), rng))
        return "\n".join(lines) + "\n"


def mutate_words(words: tuple[str, ...], rng: random.Random, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line with words changed, dropped, doubled or added; the name of the command stays."""
    changed = list(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        i = rng.randrange(1, len(changed) + 1)
        way = rng.randrange(6)
        safe = [text for text in NASTY if "\0" not in text]
        if way == 0 and i < len(changed):
            changed[i] = rng.choice(safe)
        elif way == 1 and i < len(changed):
            del changed[i]
        elif way == 2:
            changed[i:i] = [rng.choice(options), rng.choice(safe)]
        elif way == 3:
            changed[i:i] = [rng.choice(options)]
        elif way == 4 and i < len(changed):
            changed[i] = mutate_text(changed[i], rng).replace("\0", "0")
        else:
            changed.insert(i, rng.choice(safe))
    return tuple(changed)
