"""What a config key means: its docstring, type and default, read from the dataclasses of the schema."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from niels_gpt.config.options import fields_of, option_of, type_of
from niels_gpt.config.schema import PRESETS, RunConfig, SourceConfig

PHASES = ("pretrain", "sft")
"""Sections of a pipeline: in front of a key they do not change its meaning."""


class KeyDoc(NamedTuple):
    """A config key and what is known about it."""

    key: str
    """Dotted: `train.base_lr`."""
    type: str
    """The values that are allowed."""
    default: str | None
    """The default as YAML; None for a section and for a key that has none."""
    text: str
    """Its docstring, as one paragraph."""
    limits: str = ""
    """The limits of its numbers: `above 0`, `in [1, 65536]`; empty if there are none."""
    since: str = ""
    """The first version that has it; empty for a section."""


def explain(key: str = "") -> list[KeyDoc]:
    """Return the documentation of a key, or of a section and all keys below it; "" is all keys.

    A phase of a pipeline may stand in front (`sft.train.B`). Raises ValueError for an unknown key, with the nearest.
    """
    known = all_keys()
    wanted = key.strip(".")
    if wanted.split(".")[0] in PHASES:
        wanted = wanted.partition(".")[2]
    parts = wanted.split(".")
    if parts[:2] == ["data", "sources"] and len(parts) > 2:
        wanted = ".".join(["data", "sources", "NAME", *parts[3:]])  # a name of the user's
    found = [entry for entry in known if not wanted or entry.key == wanted or entry.key.startswith(f"{wanted}.")]
    if not found:
        raise ValueError(f"unknown key {key}; {_suggestion(wanted, [entry.key for entry in known])}")
    return found


def _suggestion(wanted: str, known: list[str]) -> str:
    """Return the keys that end in the same word, else the nearest ones, else the sections."""
    last = wanted.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    by_last_word = {key.rpartition(".")[2]: key for key in known}
    near = near or [by_last_word[word] for word in difflib.get_close_matches(last, by_last_word, n=2, cutoff=0.6)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"the sections are {', '.join(field.name for field in dataclasses.fields(RunConfig))}"


@functools.cache
def all_keys() -> list[KeyDoc]:
    """Return the documentation of every key, in the order of the schema; a section comes before its keys."""
    return list(_keys_of(RunConfig, ""))


def _keys_of(cls: type, prefix: str, since: str = "") -> Iterator[KeyDoc]:
    docs, hints = docstrings(cls), fields_of(cls)
    for field in dataclasses.fields(cls):
        key, hint, option = prefix + field.name, type_of(hints[field.name]), option_of(hints[field.name])
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield KeyDoc(key, "section", None, docs[field.name])
            if key == "model":
                yield KeyDoc("model.preset", " | ".join(PRESETS), None, _preset_text())
            yield from _keys_of(hint, f"{key}.", max(since, option.since))
            continue
        if hint == dict[str, SourceConfig]:
            yield KeyDoc(key, "section", None, docs[field.name])
            yield KeyDoc(f"{key}.NAME", "section", None, "A source of yours, under a name that you choose.")
            yield from _keys_of(SourceConfig, f"{key}.NAME.", option.since)
            continue
        text, newest = docs[field.name], max(since, option.since)
        types = {hint, *get_args(hint)}
        not_empty = "not empty" if str in types and option.low == 1 else ""
        limits = option.limits() if {int, float} & types else not_empty
        yield KeyDoc(key, type_text(hint), _default(field), text, limits, newest)


def _preset_text() -> str:
    return "A model size by name; the other keys of the section override it. v0 is the defaults."


def _default(field: dataclasses.Field[Any]) -> str | None:
    """Return the default of a field as YAML in one line; None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return None
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{name}: {share}" for name, share in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def type_text(hint: Any) -> str:
    """Return a type as a reader of YAML says it: `adamw | muon`, `int or null`, `list of float`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        names = [type_text(each) for each in arguments if each is not NoneType]
        return " or ".join(dict.fromkeys(names + (["null"] if NoneType in arguments else [])))
    if origin is tuple:
        inner = [each for each in arguments if each is not Ellipsis]
        size = "" if Ellipsis in arguments else f"{len(inner)} "
        return f"list of {size}{type_text(inner[0])}"
    if origin is dict:
        return f"map of names to {type_text(arguments[1])}"
    return {bool: "true | false", str: "text"}.get(hint, getattr(hint, "__name__", str(hint)))


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Return {field: the string below it in the source}, inherited fields too."""
    docs: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        module = ast.parse(inspect.getsource(sys.modules[parent.__module__]))
        body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == parent.__name__)
        for statement, following in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                docs[statement.target.id] = " ".join(following.value.value.split())
    return docs
