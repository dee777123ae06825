"""Read configs from YAML and `section.key=value` overrides, check them, and write them as YAML.

`options.build` checks all values. An unknown key is an error that names the nearest known key.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.config.builtin_configs import find_config
from niels_gpt.config.checks import unknown_key_message
from niels_gpt.config.options import build, fields_of
from niels_gpt.config.schema import PRESETS, RunConfig, TrainConfig, default_warmup
from niels_gpt.config.splice import SpliceConfig

DEEPEST = 50
"""Maximum nesting depth of a config; a valid one needs five levels."""


def load_config(
    path: str | Path | None = None, *, overrides: Iterable[str] = (), notes: list[str] | None = None
) -> RunConfig:
    """Return the RunConfig of a YAML file (None: the defaults) with `section.key=value` overrides applied.

    path: a file, or the name of a built-in config.
    notes: what was adapted is appended here, one line each: a warm-up that is not set is at most a tenth of a run.

    Raises ValueError that names the key, the value and what is allowed: for unknown keys (with the nearest known key),
    wrong types, values out of range, and invalid YAML.
    """
    tree = read_sections(path)
    for item in overrides:
        _apply_override(tree, item)
    return config_from_dict(tree, where="config" if path is None else str(path), notes=notes)


def with_data(config: RunConfig, data: Mapping[str, Any], sources: Sequence[str] = ()) -> RunConfig:
    """Return the config with data options (None: not given) and paths of sources (`NAME=PATH`) applied.

    `data["notes"]` holds options of data.notes; its patterns of `exclude` are added to those of the config.
    Raises ValueError for a value that is not allowed, and for a source that the config does not have.
    """
    given = {key: value for key, value in data.items() if value is not None}
    if not given and not sources:
        return config
    tree = to_dict(config)
    notes = dict(given.pop("notes", {}))
    known = tree["data"]["notes"]["exclude"]
    notes["exclude"] = [*known, *(pattern for pattern in notes.get("exclude", ()) if pattern not in known)]
    tree["data"] |= given
    tree["data"]["notes"] |= notes
    for item in sources:
        name, _, path = item.partition("=")
        if not path:
            raise ValueError(f"--source takes NAME=PATH, got {item!r}")
        if name not in config.data.sources:
            known = ", ".join(config.data.sources) or "none"
            raise ValueError(f"--source {item}: the config has no data.sources.{name}; its sources are: {known}")
        tree["data"]["sources"][name]["path"] = path
    return config_from_dict(tree, where="options")


def read_sections(path: str | Path | None) -> dict[str, Any]:
    """Return the sections of a YAML file; none for None. Raises ValueError."""
    if path is None:
        return {}
    try:
        loaded = _parse(find_config(path).read_text(encoding="utf-8"), f"{path} is not valid YAML")
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a config file") from None
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} is not utf-8 text (byte {err.start})") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"{path} must contain sections such as `model:`, but it is a {type(loaded).__name__}")
    return loaded or {}


def load_pipeline(
    path: str | Path | None = None, *, overrides: Iterable[str] = (), notes: list[str] | None = None
) -> dict[str, RunConfig]:
    """Return {"pretrain": ..., "sft": ...} of a YAML file with the sections `data` (for both), `pretrain` and `sft`.

    Each section is a complete config. Both phases use the model of `pretrain`, by default v1. `path`, `overrides` and
    `notes` are as for `load_config`, with the phase in front (`sft.train.total_steps=100`). Raises ValueError as
    `load_config` does.
    """
    tree = read_sections(path)
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
                raise ValueError(f"{where}: {key}.{name} cannot be set: the pipeline sets it; remove it")
    if isinstance(first.setdefault("model", {}), Mapping):
        first["model"] = {"preset": "v1", **first["model"]}
    for key, section in (("pretrain", first), ("sft", second)):
        phase_data = section.get("data", {})
        if not isinstance(phase_data, Mapping):
            raise ValueError(f"{where}: {key}.data must be a section, got {phase_data!r}")
        section["data"] = {**tree.get("data", {}), **phase_data}
    adapted: dict[str, list[str]] = {"pretrain": [], "sft": []}
    tree = {**first, "task": "pretrain"}
    pretrain = config_from_dict(tree, where=f"{where}, pretrain", notes=adapted["pretrain"])
    second["data"].setdefault("retain", dict(pretrain.train.p_val))
    tree = {**second, "task": "sft", "model": to_dict(pretrain.model)}
    sft = config_from_dict(tree, where=f"{where}, sft", notes=adapted["sft"])
    if notes is not None:
        notes += [f"{phase}: {note}" for phase, made in adapted.items() for note in made]
    return {"pretrain": pretrain, "sft": sft}


def config_from_dict(tree: Mapping[str, Any], *, where: str = "config", notes: list[str] | None = None) -> RunConfig:
    """Return the RunConfig of a nested dict. `notes` are as for `load_config`, and so is the ValueError."""
    tree = _with_fitting_warmup(_with_preset(tree, where=where), notes)
    _check_plain(tree, where)
    try:
        made: RunConfig = build(RunConfig, tree, splice_options=fields_of(SpliceConfig))
    except ValueError as err:
        raise ValueError(f"{where}: {err}") from None
    return made


def _with_preset(tree: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """Expand `model: {preset: v1, ...}`; other keys of the section override the preset."""
    model = tree.get("model") if isinstance(tree, Mapping) else None
    if not isinstance(model, Mapping) or "preset" not in model:
        return tree
    if not isinstance(model["preset"], str) or model["preset"] not in PRESETS:
        raise ValueError(f"{where}: model.preset must be one of {', '.join(PRESETS)}, got {model['preset']!r}")
    rest = {key: value for key, value in model.items() if key != "preset"}
    return {**tree, "model": {**PRESETS[model["preset"]], **rest}}


def _with_fitting_warmup(tree: Mapping[str, Any], notes: list[str] | None) -> Mapping[str, Any]:
    """Set a warm-up that the config does not set to at most a tenth of its steps."""
    train = tree.get("train") if isinstance(tree, Mapping) else None
    if not isinstance(train, Mapping) or "warmup_steps" in train:
        return tree
    total, default = train.get("total_steps"), TrainConfig.warmup_steps
    if not isinstance(total, int) or isinstance(total, bool) or default_warmup(total) == default:
        return tree
    warmup = default_warmup(total)
    if notes is not None:
        notes.append(
            f"warm-up: {warmup} of {total} steps instead of {default}; train.warmup_steps=N sets another number"
        )
    return {**tree, "train": {**train, "warmup_steps": warmup}}


def dump_config(config: RunConfig, *, sections: Sequence[str] = ()) -> str:
    """Return the resolved config as YAML; `load_config` reads it back to an equal config.

    sections: those to write; none: all.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent_text(dumper: Any, text: str) -> Any:
        # PyYAML reads the line breaks U+0085, U+2028 and U+2029 back as they are only from escapes.
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent_text)
    _add_float_resolver(Dumper)  # quotes a folder named 1e5, so that it is read back as a string
    tree = to_dict(config, sections=sections)
    if config.splice == SpliceConfig():  # not the task splice: forty lines of defaults would only distract
        tree.pop("splice", None)
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def to_dict(config: Any, *, sections: Sequence[str] = ()) -> dict[str, Any]:
    """Convert a dataclass to a nested dict of plain values (tuples become lists). sections: those to keep, or all."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {key: plain[key] for key in sections} if sections else plain


def with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a config saved by an older version with the defaults of newer options."""
    defaults = to_dict(RunConfig())
    return {
        key: {**defaults.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in saved.items()
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old value, new value)} for the values that differ between two nested dicts."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping) and not key.startswith("p_"):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def _parse(text: str, complaint: str) -> Any:
    """Parse YAML with the safe loader, except that 3e-4 is a number (YAML 1.1 requires 3.0e-4).

    Raises ValueError that begins with `complaint`, also for duplicate keys and for too deep nesting.
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
                    problem = f"duplicate key {key.value}"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                seen.add(name)
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except yaml.YAMLError:
                raise
            except Exception:  # an impossible date, a number without digits: PyYAML raises other exceptions for these
                kind = node.tag.rpartition(":")[2]
                problem = f"{str(node.value)[:40]!r} is not a valid {kind}; quote it if it is text"
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
    """Set `a.b=value` in the tree; the value is parsed as YAML (3, 3e-4, true and {wiki: 1} work)."""
    key, equals, text = item.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"--set takes section.key=value, got {item!r}")
    value = _parse(text, f"--set {item}: cannot parse the value")
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ValueError(f"--set {item}: {part} is a value, not a section")
        node = child
    node[path[-1]] = value
    if path[-2:-1] == ["model"] and path[-1] in ("C", "H"):
        node.pop("D", None)  # always C // H; the value in the file belongs to the old C and H


def _check_plain(value: Any, where: str, path: str = "", inside: tuple[int, ...] = ()) -> None:
    """Raise ValueError for YAML types that JSON does not have, and for characters that no path can hold."""
    name = f"{where}: {path or 'the config'}"
    if id(value) in inside:  # &a [*a]
        raise ValueError(f"{name} contains itself: replace the YAML alias by its value")
    if isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            _check_plain(str(key), where, path)
            _check_plain(each, where, f"{path}.{key}" if path else str(key), (*inside, id(value)))
    elif isinstance(value, str):
        if "\0" in value:
            raise ValueError(f"{name} contains a NUL character, got {value!r}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # also a file name in another encoding
            raise ValueError(f"{name} is not utf-8, got {value!r}: rename the file, or retype the text") from None
    elif not isinstance(value, bool | int | float | None):  # dates and sets
        raise ValueError(f"{name} must not be a {type(value).__name__}, got {value!r}; quote it if it is text")
