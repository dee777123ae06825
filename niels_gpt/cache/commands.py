"""What the cache commands do and show."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from niels_gpt.cache.build_cache import TrainEmpty
from niels_gpt.cache.formats import NO_LIMIT, SPLITS, TEST, splits_of
from niels_gpt.cache.meta import CacheError, read_meta
from niels_gpt.cache.sources.build import (
    OPTIONAL,
    PRETRAIN,
    SFT,
    BuildResult,
    build,
    folder_of,
    install_tokenizer,
    known_sources,
    open_tokenizer,
    refuse_other_tokenizer,
    train_on,
    write_placeholder,
)
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.cache.verify import (
    differences,
    find_caches,
    stream_slice,
    verify_cache,
)
from niels_gpt.cache.writing.partial_build import OnProgress, Progress
from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.reading.local import DataUnavailable
from niels_gpt.data.registry import Source
from niels_gpt.system import files
from niels_gpt.system.console import error_message, format_duration, short_number
from niels_gpt.tokenizer import Tokenizer, load_tokenizer

BUDGETS = {"fineweb_edu": "fineweb", "gutenberg": "gutenberg"}
"""Sources with budgets, and what the options of build-all call them."""
IN_PART = 3
"""Exit code: some caches were built, others could not be."""


def run_build(
    settings: BuildSettings,
    *,
    names: list[str] | None,
    only: list[str],
    skip: list[str],
    tokenizer: Path | None,
    config: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build the caches of these sources (None: all), one after the other; what cannot be built is said at the end."""
    console = Console(highlight=False, stderr=as_json)
    if not console.is_terminal:  # a pipe has no width to keep to
        console.width = 120
    chosen = choose_sources(names, only, skip, config)
    failed: dict[str, Exception] = {}
    made_with = _tokenizer(settings, tokenizer, chosen, failed, console)
    try:
        results = [
            _build_one(source, settings, made_with, failed, force=force, all_=names is None) for source in chosen
        ]
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from the last complete shard", file=sys.stderr)
        sys.exit(130)
    missing = [result for result in results if result.state == "failed"]
    if as_json:
        print(json.dumps([_plain(result) for result in results], indent=2, ensure_ascii=False))
    else:
        _show_results(console, results)
    for result in (r for r in results if r.reason and not as_json):
        print(f"{result.name}: {result.state}: {result.reason}", file=sys.stderr)
    if missing:
        others = sum(result.state in ("built", "up to date") for result in results)
        optional = len(results) - len(missing) - others
        rest = f", {optional} optional not" if optional else ""
        said = f"{len(missing)} of {len(results)} caches could not be built; {others} are there{rest}"
        print(f"error: {said}", file=sys.stderr)
        sys.exit(IN_PART if others else 1)


def choose_sources(names: list[str] | None, only: list[str], skip: list[str], config: Path | None) -> list[Source]:
    """Sources by name (None: those of build-all and of the config). Raises ValueError for names that are not there."""
    data = load_config(config).data if config else None
    known = known_sources(data)
    for name in (*(names or ()), *only, *skip):
        if name not in known:
            raise ValueError(f"no source {name!r}; there are {', '.join(known)}")
    everything = [*PRETRAIN, *SFT, *(data.sources if data else ())] if names is None else list(dict.fromkeys(names))
    wanted = [name for name in (only or everything) if name not in skip]
    if not wanted:
        raise ValueError("--only and --skip leave no source to build")
    return [known[name] for name in dict.fromkeys(wanted)]


def _tokenizer(
    settings: BuildSettings, given: Path | None, chosen: list[Source], failed: dict[str, Exception], console: Console
) -> Tokenizer:
    new = not (settings.cache_dir / "tokenizer" / "spm.model").exists()
    if new:
        files.check_output_path(settings.cache_dir, "--cache-dir", folder=True)
        refuse_other_tokenizer(settings.cache_dir, chosen, given)
    if given is not None:
        return install_tokenizer(given, settings.cache_dir)
    if not new:
        return open_tokenizer(settings.cache_dir)
    began = time.monotonic()

    def unreachable(source: Source, err: Exception) -> None:
        failed[source.name] = err

    listed = ", ".join(source.name for source in chosen)
    console.print(f"training a tokenizer of {settings.vocab_size:,} pieces on {escape(listed)}")
    with console.status("training"):
        try:
            made = train_on(chosen, settings, unreachable)
        except ValueError as err:
            if len(failed) < len(chosen):
                raise
            reasons = "; ".join(f"{name}: {error_message(reason)}" for name, reason in failed.items())
            raise ValueError(f"no source can be read. {reasons}") from err
    console.print(f"tokenizer: {made.vocab_size:,} ids, in {format_duration(time.monotonic() - began)}")
    if failed:
        unseen = ", ".join(failed)
        print(
            f"warning: the tokenizer has not seen {unseen}, which cannot be read now. For it to learn from them later, "
            f"remove {settings.cache_dir} then and build again; all caches in it share the tokenizer",
            file=sys.stderr,
        )
    return made


def _build_one(
    source: Source,
    settings: BuildSettings,
    tokenizer: Tokenizer,
    failed: dict[str, Exception],
    *,
    force: bool,
    all_: bool,
) -> BuildResult:
    """The result; errors of the source itself become its reason, so that the others are built all the same."""
    try:
        if source.name in failed:
            raise failed[source.name]
        with _showing(source.name) as on_progress:
            return build(source, settings, tokenizer, force=force, on_progress=on_progress)
    except (OSError, ValueError) as err:
        reason = error_message(err) + _remedy(err, source, all_=all_)
        if all_ and source.name in OPTIONAL and isinstance(err, DataUnavailable):
            return write_placeholder(source, settings, reason)
        return BuildResult(source.name, folder_of(source, settings.cache_dir), "failed", {}, reason)


def _remedy(err: Exception, source: Source, *, all_: bool) -> str:
    """The option that leaves train empty, where one does."""
    if not isinstance(err, TrainEmpty) or not err.budget or source.name not in BUDGETS:
        return ""
    option = f"--{BUDGETS[source.name] + '-' if all_ else ''}{err.budget}-tokens"
    return f": give a {'larger' if err.budget == 'train' else 'smaller'} {option}"


@contextlib.contextmanager
def _showing(name: str) -> Iterator[OnProgress]:
    """Tokens, rate and time left while a cache is built: a live line on a terminal, now and then a line elsewhere."""
    console = Console(stderr=True, highlight=False)
    clock = _Clock(name)
    if console.is_terminal:
        with console.status(f"{name}: reading") as status:
            yield lambda progress: status.update(clock.text(progress))
        return

    shown = time.monotonic()

    def line(progress: Progress) -> None:
        nonlocal shown
        text = clock.text(progress)
        if time.monotonic() - shown >= 5.0:
            shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield line


class _Clock:
    """Rate and time left, from the first progress on: before it a source was opened, or an old build gone on with."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: tuple[float, Progress] | None = None

    def text(self, progress: Progress) -> str:
        now = time.monotonic()
        began, first = self._first = self._first or (now, progress)
        done = f"{self._name}: {short_number(progress.tokens)} tokens of {progress.documents:,} documents"
        seconds = now - began
        if seconds <= 0:
            return done
        done += f", {short_number((progress.tokens - first.tokens) / seconds)} tok/s"
        if progress.share is not None and first.share is not None and progress.share > first.share:
            done += f", {format_duration(seconds * (1 - progress.share) / (progress.share - first.share))} left"
        return done


def _show_results(console: Console, results: list[BuildResult]) -> None:
    table = Table(box=None, pad_edge=False)
    splits = max((splits_of(result.meta) for result in results), key=len)
    for name in ("cache", "", "train", "held out", *splits[2:], "left out"):
        table.add_column(name, justify="left" if name in ("cache", "") else "right", no_wrap=True)
    for result in results:
        meta = result.meta
        numbers = [_amount(meta, split) for split in splits]
        dropped = f"{sum(meta['dropped'].values()):,}" if "dropped" in meta else ""
        table.add_row(result.name, result.state, *numbers, dropped)
    console.print(table)


def _plain(result: BuildResult) -> dict[str, Any]:
    totals = {k: v for k, v in result.meta.items() if k.endswith(("_tokens", "_examples", "_documents"))}
    listed = {"name": result.name, "state": result.state, "folder": str(result.folder), "reason": result.reason}
    return listed | totals


def _amount(meta: dict[str, Any], split: str) -> str:
    if f"{split}_tokens" not in meta:
        return ""
    tokens = f"{short_number(meta[f'{split}_tokens'])} tokens"
    return f"{meta[f'{split}_examples']:,} examples, {tokens}" if f"{split}_examples" in meta else tokens


# --- verify, inspect, diff -------------------------------------------------------------------------


def run_verify(path: Path, *, as_json: bool) -> None:
    console = Console(stderr=True)
    with console.status("verifying") as status:
        sound = verify_cache(path, on_file=lambda file: status.update(f"verifying {file}"))
    if as_json:
        print(json.dumps([str(folder) for folder in sound]))
        return
    for folder in sound:
        meta = read_meta(folder / "meta.json")
        size = sum(listed["bytes"] for listed in meta["files"].values())
        print(f"{folder}: {len(meta['files'])} files, {short_number(size)}B, as built")


def run_inspect(
    path: Path, *, split: str, seed: int | None, tokens: int, tokenizer: Path | None, as_json: bool
) -> None:
    if split not in (*SPLITS, TEST):
        raise ValueError(f"--split must be train, val or test, got {split!r}")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    shown = [_inspected(folder, split, generator, tokens, tokenizer) for folder in find_caches(path)]
    if as_json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for number, entry in enumerate(shown):
        if number:
            console.print()
        _show_inspected(console, entry)


def _inspected(
    folder: Path, split: str, generator: torch.Generator, tokens: int, tokenizer: Path | None
) -> dict[str, Any]:
    """The meta of a cache and a decoded sample of it."""
    meta = read_meta(folder / "meta.json")
    entry: dict[str, Any] = {"folder": str(folder), "split": split, "meta": meta}
    if split not in splits_of(meta):
        raise CacheError(f"{folder} has no {split} split: --split is one of {', '.join(splits_of(meta))}")
    total = meta.get(f"{split}_tokens", 0)
    if not total:
        return entry
    path = tokenizer or folder.resolve().parent.parent / "tokenizer"
    try:
        decoder = load_tokenizer(path)
    except FileNotFoundError:
        raise CacheError(f"{folder}: no tokenizer at {path} to decode it with; give --tokenizer") from None
    if meta.get("tokenizer_sha256") not in (None, decoder.sha256):
        raise CacheError(f"{folder} was built with another tokenizer than {path}; give --tokenizer")
    start = int(torch.randint(max(total - tokens, 0) + 1, (1,), generator=generator))
    ids = stream_slice(folder, split, start, tokens)
    return entry | {"token": start, "ids": ids.tolist(), "text": decoder.decode(ids), "shown": decoder.render(ids)}


def _show_inspected(console: Console, entry: dict[str, Any]) -> None:
    meta = entry["meta"]
    console.print(Text(entry["folder"], style="bold"), soft_wrap=True)
    if meta.get("built") is False:
        console.print(f"not built: {meta.get('reason')}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    listing = meta.get("files", {})
    table.add_row("files", f"{len(listing)}, {short_number(sum(item['bytes'] for item in listing.values()))}B")
    for key, value in meta.items():
        if key not in ("files", "format", "split_rule"):
            table.add_row(key, escape(_shown(key, value)))
    table.add_row("split_rule", escape(str(meta.get("split_rule"))))
    console.print(table)
    if "text" in entry:
        console.print(f"\n{entry['split']}, from token {entry['token']:,} on:")
        console.print(Text(entry["shown"], style="green"), soft_wrap=True)


def _shown(key: str, value: Any) -> str:
    """A value of the meta as a person reads it: shas are shortened (--json has them whole)."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(name, inner)}" for name, inner in value.items()) or "none"
    if key.endswith("sha256") and isinstance(value, str):
        return f"{value[:12]}..."
    if type(value) is int and key != "seed":
        return "no limit" if value == NO_LIMIT else f"{value:,}"
    return "none" if value is None else str(value)


def run_diff(first: Path, second: Path, *, as_json: bool) -> None:
    found = list(differences(first, second))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(found) if found else f"{first} and {second} are the same")
    if found:
        sys.exit(1)
