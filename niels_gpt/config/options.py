"""An option is declared once: type, limits and version with its field, its help in the text below the field.

    B: Annotated[int, Option(1)] = 32
    \"""Rows per step.\"""

`check_fields` holds a config to its declarations, and `build` makes one from a nested dict: both name the option, the
value and what is allowed. `explain.py` and the commands read the same declarations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import sys
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from niels_gpt.config.checks import check_probabilities, unknown_key_message

MOST = 2**62
"""Integers up to this one count as unlimited: sums and products of them fit into 64 bits."""


class Option(NamedTuple):
    """What a field says beside its type."""

    low: float = -math.inf
    """Smallest number; of text, 1 means that it must not be empty."""
    high: float = math.inf
    ends: str = "[]"
    """`(` excludes the lowest value, `)` the highest."""
    why: str = ""
    """Follows the limits in an error."""
    shares: bool = False
    """Of a map of names to numbers: they sum to 1."""
    since: str = "0.1"
    """The first version that has the option."""

    def allows(self, number: float) -> bool:
        """Whether a number is within the limits."""
        above = number > self.low if self.ends[0] == "(" else number >= self.low
        return above and (number < self.high if self.ends[1] == ")" else number <= self.high)

    def limits(self) -> str:
        """The limits of numbers, in words; empty if there are none."""
        low, high = self.low, self.high
        if low == -math.inf:
            return ""
        if high == math.inf:
            return f"above {low}" if self.ends[0] == "(" else f"of at least {low}"
        return f"in {self.ends[0]}{low}, {high}{self.ends[1]}"


class Kind(NamedTuple):
    """One of the types of an option."""

    type: Any
    option: Option

    def text(self, value: Any = None) -> str:
        """What is allowed, in words; `value` was refused."""
        low, high = self.option.low, self.option.high
        if self.type is NoneType:
            return "null"
        if self.type is bool:
            return "true or false"
        if self.type is str:
            return "text that is not empty" if low == 1 else "text"
        if self.type is int:
            if high == math.inf and not (isinstance(value, int) and abs(value) > MOST):
                return "an integer" + (f" of at least {low}" if low > -math.inf else "")
            return f"an integer from {max(low, -MOST)} to {MOST if high == math.inf else high}"
        if self.type is float:
            if high < math.inf:
                return f"a number {self.option.limits()}"
            return "a number" if low == -math.inf else f"a finite number {self.option.limits()}"
        if get_origin(self.type) is Literal:
            return f"one of {', '.join(map(repr, get_args(self.type)))}"
        if get_origin(self.type) is tuple:
            return f"a list of these: {text_of(Annotated[get_args(self.type)[0], self.option])}"
        if get_origin(self.type) is dict:
            return f"a map of names to {get_args(self.type)[1].__name__}s"
        return f"a section, or a {self.type.__name__}"


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """The fields of a config class with their declarations."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def option_of(declared: Any) -> Option:
    """The Option of a declaration; the default if there is none."""
    found = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return next((each for each in found if isinstance(each, Option)), Option())


def type_of(declared: Any) -> Any:
    """The type of a declaration, without its Option."""
    return get_args(declared)[0] if get_origin(declared) is Annotated else declared


@functools.cache
def kinds_of(declared: Any) -> tuple[Kind, ...]:
    """The types of a declaration, null last."""
    option, kind = option_of(declared), type_of(declared)
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(Kind(each, option) for each in sorted(kinds, key=lambda each: each is NoneType))


def text_of(declared: Any, value: Any = None) -> str:
    """What a declaration allows, in words; `value` was refused."""
    return " or ".join(kind.text(value) for kind in kinds_of(declared))


def check_fields(config: Any, section: str) -> None:
    """Convert the fields of a frozen config to their types. Raises ValueError for a value that is not allowed."""
    for name, declared in fields_of(config.__class__).items():
        value = checked(f"{section}.{name}" if section else name, getattr(config, name), declared)
        object.__setattr__(config, name, value)


def build(cls: type, tree: Any, path: str = "", splice_options: Collection[str] = ()) -> Any:
    """Return a config of a nested dict. Raises ValueError for unknown keys and for values that are not allowed.

    path: its dotted key. splice_options: see `unknown_key_message`.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path or 'the config'} must be a section, got {tree!r}")
    known = fields_of(cls)
    for key in tree:
        if key not in known:
            raise ValueError(unknown_key_message(path, str(key), list(known), splice_options))
    prefix = f"{path}." if path else ""
    return cls(**{key: checked(prefix + key, value, known[key], splice_options) for key, value in tree.items()})


def checked(name: str, value: Any, declared: Any, splice_options: Collection[str] = ()) -> Any:
    """Return a value in a type of its declaration. Raises ValueError that names the option, the value and the limits.

    Numbers of numpy become Python's, lists tuples, and paths text.
    """
    kinds = kinds_of(declared)
    if getattr(value, "ndim", 0) == 1:
        value = value.tolist()
    for kind in kinds:
        if isinstance(kind.type, type) and dataclasses.is_dataclass(kind.type):
            return value if isinstance(value, kind.type) else build(kind.type, value, name, splice_options)
        if get_origin(kind.type) is tuple and isinstance(value, list | tuple):
            return _checked_list(name, value, kind)
        if get_origin(kind.type) is dict and isinstance(value, Mapping):
            return _checked_map(name, value, kind)
        found = _scalar(value, kind)
        if found is not _REFUSED:
            return found
    why = kinds[0].option.why
    raise ValueError(f"{name} must be {text_of(declared, value)}, got {value!r}{': ' if why else ''}{why}")


_REFUSED: Any = object()


def _scalar(value: Any, kind: Kind) -> Any:
    """The value as one of this kind, or _REFUSED."""
    if kind.type is NoneType:
        return None if value is None else _REFUSED
    if kind.type is bool:
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # numpy
        return bool(value) if is_bool else _REFUSED
    if kind.type is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return text if isinstance(text, str) and len(text) >= (kind.option.low == 1) else _REFUSED
    if get_origin(kind.type) is Literal:
        return value if isinstance(value, str) and value in get_args(kind.type) else _REFUSED
    if kind.type in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _number(value, kind)
    return _REFUSED


def _number(value: numbers.Real, kind: Kind) -> Any:
    if kind.type is int and not isinstance(value, numbers.Integral):
        return _REFUSED
    try:
        number = kind.type(value)
    except (OverflowError, ValueError):  # an integer beyond any float; int(nan)
        return _REFUSED
    most = MOST if kind.type is int else sys.float_info.max
    return number if kind.option.allows(number) and (kind.option.high < math.inf or abs(number) <= most) else _REFUSED


def _checked_list(name: str, value: list[Any] | tuple[Any, ...], kind: Kind) -> tuple[Any, ...]:
    inner = get_args(kind.type)
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(value)
    if len(inner) != len(value):
        raise ValueError(f"{name} must be a list of {len(inner)}, got {list(value)!r}")
    each = [Annotated[declared, kind.option] if option_of(declared) == Option() else declared for declared in inner]
    return tuple(checked(f"{name}.{i}", *pair) for i, pair in enumerate(zip(value, each, strict=True)))


def _checked_map(name: str, value: Mapping[Any, Any], kind: Kind) -> dict[str, Any]:
    _, declared = get_args(kind.type)
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{name} must have names as keys, got {key!r}")
    found = {key: checked(f"{name}.{key}", each, declared) for key, each in value.items()}
    if kind.option.shares:
        check_probabilities(found, name=name)
    return found
