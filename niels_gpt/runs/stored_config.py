"""The YAML config of a run, with a hidden copy that tells edits and damage.

The YAML file is the config: people may edit it. The copy `.NAME.json` holds what the program wrote, with a checksum.
A difference between them is reported with the keys, so that a damaged value does not pass for the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import differences, dump_config, load_config, to_dict, with_defaults
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.console import error_message


def copy_path(path: Path) -> Path:
    """The path of the copy of a config file."""
    return path.with_name(f".{path.name}.json")


def write_stored_config(path: Path, config: RunConfig, *, sections: Sequence[str] = ()) -> None:
    """Write a config, with absolute paths: commands on the run work from any folder.

    sections: those to write; none: all.
    """
    config = with_absolute_paths(config)
    files.write_text(path, dump_config(config, sections=sections))
    write_checked_json(copy_path(path), to_dict(config, sections=sections))


def read_stored_config(path: Path) -> RunConfig:
    """Read a config, and warn if it differs from the one that was written. Raises ValueError as `load_config` does."""
    config = load_config(path)
    warn_of_changes(path, to_dict(config))
    return config


def warn_of_changes(path: Path, found: Mapping[str, Any]) -> None:
    """Warn once, with the keys, if a config differs from the one that was written; older runs have no copy of it."""
    try:
        written = with_defaults(read_checked_json(copy_path(path)))
    except FileNotFoundError:
        return
    except OSError as err:
        warnings.warn(f"{error_message(err)}: cannot tell whether {path} has changed", stacklevel=1)
        return
    except DamagedJSON as err:
        warnings.warn(f"{copy_path(path)} is damaged ({err}): cannot tell whether {path} has changed", stacklevel=1)
        return
    both = [key for key in written if key in found]
    changed = differences({key: written[key] for key in both}, {key: found[key] for key in both})
    if changed:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        warnings.warn(f"{path} has changed since it was written: {listed}", stacklevel=1)
