"""The folder of token caches that a config trains on, and what to type if caches are missing there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.config import DataConfig, RunConfig
from niels_gpt.pretrained.initial_weights import initial_tokenizer
from niels_gpt.system.program import command


def open_caches(config: RunConfig) -> CacheFolder:
    """The folder of the token caches of a config. Raises CacheError, with the command that builds them."""
    return CacheFolder(_location(config), build=functools.partial(build_command, config))


def build_command(config: RunConfig, names: Sequence[str] = (), *, cache_dir: str | None = None) -> str:
    """What to type to build the caches of these sources, by default of all that the config trains on.

    Caches for a model with a tokenizer (`init_from`) are built with it. cache_dir: default: the folder of the config.
    """
    data, default, wanted = config.data, DataConfig(), names or _sources(config)
    own_paths = {"--notes": ("roam", data.roam), "--primer": ("primer", data.primer)}
    paths = {k: path for k, (name, path) in own_paths.items() if name in wanted and path not in ("auto", "embedded")}
    if names and (len(names) == 1 or not paths):
        words = ["cache", "build", *names, *(word for path in paths.values() for word in ("--path", path))]
    else:
        words = ["cache", "build-all", *(word for name in wanted for word in ("--only", name))]
        words += [word for pair in paths.items() for word in pair]
    with contextlib.suppress(ValueError, OSError):  # init_from of a resumed run may be gone
        tokenizer = initial_tokenizer(config.init_from) if config.init_from else None
        words += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    words += ["--cache-dir", cache_dir or _location(config)]
    own = any(name in data.sources for name in wanted)
    if own or (data.notes, data.encoding_errors) != (default.notes, default.encoding_errors):
        words += ["--config", "CONFIG"]
    return command(*words)


def _location(config: RunConfig) -> str:
    return config.splice.base or config.data.token_cache


def _sources(config: RunConfig) -> list[str]:
    """The names of the caches that a config trains and evaluates on."""
    if config.task == "splice":
        return [config.splice.dataset_name or "roam"]
    return [name for name, share in {**config.train.p_val, **config.train.p_train}.items() if share]
