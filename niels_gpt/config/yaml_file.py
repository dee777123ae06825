"""Configs as files: YAML and `section.key=value` in, checked; YAML out.

YAML is turned into JSON and checked by pydantic in strict mode; unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from niels_gpt.config.checks import unknown_key_message
from niels_gpt.config.schema import PRESETS, RunConfig, SourceConfig
from niels_gpt.config.splice import SpliceConfig

DEEPEST = 50
"""Sections, lists and values inside one another that a config may have; it needs five."""


def load_config(path: str | Path | None = None, *, overrides: Iterable[str] = ()) -> RunConfig:
    """The RunConfig of a YAML file (None: the defaults) with `section.key=value` overrides on top.

    Raises ValueError that names the key, the value and what is allowed: unknown keys (with the
    nearest known one), wrong types, numbers that do not fit, YAML that does not parse.
    """
    tree = _read_tree(path)
    for item in overrides:
        _apply_override(tree, item)
    return config_from_dict(tree, where="config" if path is None else str(path))


def _read_tree(path: str | Path | None) -> dict[str, Any]:
    """The sections of a YAML file; none for None. Raises ValueError."""
    if path is None:
        return {}
    try:
        loaded = _parse(Path(path).read_text(encoding="utf-8"), f"{path} is not valid YAML")
    except FileNotFoundError:
        raise ValueError(f"no config file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a config file") from None
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} is not utf-8 text (byte {err.start})") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold sections such as `model:`, but is a {type(loaded).__name__}")
    return loaded or {}


def load_pipeline(path: str | Path | None = None, *, overrides: Iterable[str] = ()) -> dict[str, RunConfig]:
    """{"pretrain": ..., "sft": ...} of a YAML file with the sections `data` (for both), `pretrain` and `sft`.

    Each section is a config of its own; the model is that of `pretrain`, by default v1. `overrides` are as for
    `load_config`, with the section in front (`sft.train.total_steps=100`). Raises ValueError as `load_config` does.
    """
    tree = _read_tree(path)
    for item in overrides:
        _apply_override(tree, item)
    where = "config" if path is None else str(path)
    for key in tree:
        if key not in ("data", "pretrain", "sft"):
            raise ValueError(f"{where}: {unknown_key_message('', str(key), ['data', 'pretrain', 'sft'])}")
    for key, section in tree.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{where}: {key} must be a section, got {section!r}")
    first, second = dict(tree.get("pretrain", {})), dict(tree.get("sft", {}))
    for key, refused in (("pretrain", ("task",)), ("sft", ("task", "model", "init_from"))):
        for name in refused:
            if name in tree.get(key, {}):
                raise ValueError(f"{where}: {key}.{name} is not for you to set: pretrain and the phase decide it")
    if isinstance(first.setdefault("model", {}), Mapping):
        first["model"] = {"preset": "v1", **first["model"]}
    for key, section in (("pretrain", first), ("sft", second)):
        own = section.get("data", {})
        if not isinstance(own, Mapping):
            raise ValueError(f"{where}: {key}.data must be a section, got {own!r}")
        section["data"] = {**tree.get("data", {}), **own}
    pretrain = config_from_dict({**first, "task": "pretrain"}, where=f"{where}, pretrain")
    second["data"].setdefault("retain", dict(pretrain.train.p_val))
    sft = config_from_dict({**second, "task": "sft", "model": to_dict(pretrain.model)}, where=f"{where}, sft")
    return {"pretrain": pretrain, "sft": sft}


def config_from_dict(tree: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """The RunConfig of a nested dict. Raises ValueError as `load_config` does."""
    from pydantic import TypeAdapter, ValidationError

    tree = _with_preset(tree, where=where)
    _check_keys(RunConfig, tree, where=where)
    try:
        # Strict JSON mode: no "3" for 3 and no true for 1, but a list may fill a tuple and 1 a float.
        return TypeAdapter(RunConfig).validate_json(json.dumps(tree), strict=True)
    except ValidationError as err:
        first = err.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ValueError(f"{where}: {message}") from None
        message = message.removeprefix("Input ").lower().rstrip(".")
        raise ValueError(f"{where}: {key} {message}, got {first['input']!r}") from None
    except TypeError as err:
        raise ValueError(f"{where}: {err}") from None


def _with_preset(tree: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """The tree with `model: {preset: v1, ...}` written out; keys beside the preset win."""
    model = tree.get("model") if isinstance(tree, Mapping) else None
    if not isinstance(model, Mapping) or "preset" not in model:
        return tree
    if not isinstance(model["preset"], str) or model["preset"] not in PRESETS:
        raise ValueError(f"{where}: model.preset must be one of {', '.join(PRESETS)}, got {model['preset']!r}")
    rest = {key: value for key, value in model.items() if key != "preset"}
    return {**tree, "model": {**PRESETS[model["preset"]], **rest}}


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal config."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    _add_float_resolver(Dumper)  # a folder called 1e5 is quoted, so that it is read back as a name
    tree = to_dict(config)
    if config.splice == SpliceConfig():  # another task: nobody would read forty lines that say nothing
        del tree["splice"]
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as a nested dict of plain values (tuples as lists)."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A config saved by an older version, with the defaults of the options that it did not know."""
    defaults = to_dict(RunConfig())
    return {
        key: {**defaults.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in saved.items()
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ between two nested dicts, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping) and not key.startswith("p_"):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def _parse(text: str, complaint: str) -> Any:
    """What YAML's safe loader makes of a text, except that 3e-4 is a number (YAML 1.1 wants 3.0e-4).

    Raises ValueError that begins with the complaint, also for a key that is there twice and for a nest without end.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEEPEST:
                problem = f"nested more than {DEEPEST} deep"
                raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                name = (key.tag, str(key.value))
                if name in seen:
                    problem = f"the key {key.value} is there twice, the second time"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                seen.add(name)
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except yaml.YAMLError:
                raise
            except Exception:  # a date that does not exist, a number without digits: the library lets them through
                kind = node.tag.rpartition(":")[2]
                problem = f"{str(node.value)[:40]!r} is no {kind}; quote it if it is text"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    _add_float_resolver(Loader)
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as err:
        raise ValueError(f"{complaint}: {' '.join(str(err).split())}") from None


def _add_float_resolver(cls: Any) -> None:
    number = re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$")
    cls.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))


def _apply_override(tree: dict[str, Any], item: str) -> None:
    """Set `a.b=value` in the tree; the value is read as YAML (so 3, 3e-4, true, {wiki: 1} work)."""
    key, equals, text = item.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"--set takes section.key=value, got {item!r}")
    value = _parse(text, f"--set {item}: cannot read the value")
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ValueError(f"--set {item}: {part} is a value, not a section")
        node = child
    node[path[-1]] = value
    if path[-2:-1] == ["model"] and path[-1] in ("C", "H"):
        node.pop("D", None)  # always C // H: what a file says of it was of the old ones


def _check_keys(cls: type, tree: Any, *, where: str, prefix: str = "") -> None:
    """Refuse unknown keys, at any depth, with the nearest known name."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{where}: {prefix.rstrip('.') or 'the config'} must be a section, got {tree!r}")
    hints = get_type_hints(cls)
    for key, value in tree.items():
        if key not in hints:
            raise ValueError(f"{where}: {unknown_key_message(prefix.rstrip('.'), str(key), list(hints))}")
        if dataclasses.is_dataclass(hints[key]):
            _check_keys(hints[key], value, where=where, prefix=f"{prefix}{key}.")
        elif hints[key] == dict[str, SourceConfig] and isinstance(value, Mapping):
            for name, source in value.items():
                _check_keys(SourceConfig, source, where=where, prefix=f"{prefix}{key}.{name}.")
        elif get_origin(hints[key]) is Literal and value not in get_args(hints[key]):
            allowed = ", ".join(repr(a) for a in get_args(hints[key]))
            raise ValueError(f"{where}: {prefix}{key} must be one of {allowed}, got {value!r}")
        else:
            _check_plain(value, f"{where}: {prefix}{key}")


def _check_plain(value: Any, name: str) -> None:
    """Refuse what YAML knows and JSON does not, and what no name of a file can hold."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{name} has a NUL character in it, got {value!r}")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except TypeError:  # dates and sets
        kind = type(value).__name__
        raise ValueError(f"{name} cannot be the {kind} {value!r}; quote it if it is text") from None
    except UnicodeEncodeError:  # also a name of the file system that is in another encoding
        raise ValueError(f"{name} is not utf-8, got {value!r}: rename the place, or write the text anew") from None
    except ValueError:  # &a [*a]
        raise ValueError(f"{name} holds itself, got {value!r}: write it out") from None
