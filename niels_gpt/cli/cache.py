"""`niels-gpt cache ...`, also as `python -m niels_gpt.cache.cli ...`.

Heavy modules are imported inside the functions: `niels-gpt --help` imports this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json as json_format
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from niels_gpt.cache.sources import defaults
from niels_gpt.cli.clean import clean
from niels_gpt.cli.command_line import App
from niels_gpt.cli.groups import group
from niels_gpt.cli.note_options import NoteOptions, takes_note_options
from niels_gpt.cli.options import OfflineOption
from niels_gpt.cli.run_app import run_app
from niels_gpt.system.console import error_message, format_duration, short_number
from niels_gpt.system.urls import location

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from niels_gpt.cache.sources.build import BuildResult
    from niels_gpt.cache.sources.texts import BuildSettings
    from niels_gpt.data.registry import Source
    from niels_gpt.system.executors import Executor
    from niels_gpt.tokenizer import SubwordTokenizer

app = App(
    help="Token caches: tokenize once, verify always, train from disk.",
    cls=group(moved={"inspect": "research inspect", "diff": "research diff"}),
)
app.command("clean")(clean)

OptionalText = Optional[str]  # noqa: UP045 (typer reads these at run time)
OptionalInt = Optional[int]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045

TOKEN_BUDGETS = {"fineweb_edu": "fineweb", "gutenberg": "gutenberg"}
"""Sources with token budgets -> their prefix in the options of build-all."""
WITH_SUBSETS = ("wikitext", "fineweb_edu")
"""Sources with several configs."""
PARTIAL = 3
"""Exit code: some caches were built, others could not be."""


CacheDir = Annotated[
    Path,
    typer.Option(
        "--cache-dir", parser=location, help="Folder of all caches and their tokenizer, or its URL (s3://...)."
    ),
]
Engine = Annotated[
    str, typer.Option("--engine", help="What encodes: threads of this process, or ray (a cluster; extra `ray`).")
]
Address = Annotated[
    OptionalText,
    typer.Option(
        "--address", help="Ray cluster: HOST:PORT, ray://HOST:PORT or auto; default: start one on this machine."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of splits, shuffles and the tokenizer's sample.")]
TokenizerPath = Annotated[
    OptionalPath,
    typer.Option("--tokenizer", help="spm.model or folder to use; default: that of --cache-dir, or a new one."),
]


def _if_given(context: typer.Context, parameter: typer.CallbackParam, value: int) -> int | None:
    """The value of an option, or None if the user did not type it: its default is for a new tokenizer only."""
    source = context.get_parameter_source(str(parameter.name))
    return None if source is not None and source.name == "DEFAULT" else value


VocabSize = Annotated[
    OptionalInt,
    typer.Option("--vocab-size", callback=_if_given, help="Subwords of a new tokenizer, without the special tokens."),
]
TokenizerDocuments = Annotated[
    int, typer.Option("--tokenizer-documents", min=1, help="Documents per source to train a new tokenizer on.")
]
ShardBytes = Annotated[int, typer.Option("--shard-bytes", help="Bytes of a pretrain shard.")]
FinewebId = Annotated[OptionalText, typer.Option("--fineweb-id", help="Hub id of fineweb-edu.")]
FinewebConfig = Annotated[str, typer.Option("--fineweb-config", help="Config of fineweb-edu.")]
FinewebTrain = Annotated[
    int, typer.Option("--fineweb-train-tokens", min=0, help="Maximum training tokens of fineweb-edu.")
]
FinewebVal = Annotated[int, typer.Option("--fineweb-val-tokens", min=0, help="Maximum held-out tokens of fineweb-edu.")]
FinewebStreaming = Annotated[
    bool, typer.Option("--fineweb-streaming/--no-fineweb-streaming", help="Stream it, or download the whole config.")
]
ShuffleBuffer = Annotated[int, typer.Option("--shuffle-buffer", min=1, help="Rows of fineweb-edu's shuffle buffer.")]
GutenbergTrain = Annotated[
    int, typer.Option("--gutenberg-train-tokens", min=0, help="Maximum training tokens of gutenberg.")
]
GutenbergVal = Annotated[
    int, typer.Option("--gutenberg-val-tokens", min=0, help="Maximum held-out tokens of gutenberg.")
]
WikitextConfig = Annotated[OptionalText, typer.Option("--wikitext-config", help="Default: wikitext-103-raw-v1.")]
Roam = Annotated[
    OptionalPath,
    typer.Option("--notes", help="Folder of notes; default: .roam-data/ if it exists, else the embedded notes."),
]
Primer = Annotated[
    OptionalPath,
    typer.Option("--primer", help="File of dialogues; default: data/primer.txt if it exists, else the embedded ones."),
]
RoamValFrac = Annotated[float, typer.Option("--notes-val-frac", help="Held-out fraction of the notes.")]
NotesSplit = Annotated[
    str,
    typer.Option(
        "--notes-split",
        metavar="shared_text|file",
        help="How notes are held out: those that share text together (shared_text), or one by one (file).",
    ),
]
ValFrac = Annotated[
    float, typer.Option("--val-frac", help="Held-out fraction of examples, and of the documents of your own sources.")
]
Threads = Annotated[OptionalInt, typer.Option("--threads", min=1, help="Encoding threads; default: all cores.")]
Config = Annotated[OptionalPath, typer.Option("--config", help="YAML file with your own sources (data.sources).")]
Force = Annotated[bool, typer.Option("--force", help="Also rebuild caches that are up to date.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
CachePath = Annotated[
    Path, typer.Argument(metavar="CACHE", parser=location, help="A cache, or a folder of caches; a path or a URL.")
]


@app.command("build-all")
@takes_note_options
def build_all(
    cache_dir: CacheDir = Path("cache"),
    seed: Seed = defaults.SEED,
    only: Annotated[list[str], typer.Option("--only", help="Build only this source; repeatable.")] = [],  # noqa: B006
    skip: Annotated[list[str], typer.Option("--skip", help="Skip this source; repeatable.")] = [],  # noqa: B006
    tokenizer: TokenizerPath = None,
    vocab_size: VocabSize = defaults.VOCAB_SIZE,
    tokenizer_documents: TokenizerDocuments = defaults.TOKENIZER_DOCUMENTS,
    shard_bytes: ShardBytes = defaults.SHARD_BYTES,
    fineweb_id: FinewebId = None,
    fineweb_config: FinewebConfig = defaults.FINEWEB_CONFIG,
    fineweb_train_tokens: FinewebTrain = defaults.FINEWEB_TRAIN_TOKENS,
    fineweb_val_tokens: FinewebVal = defaults.FINEWEB_VAL_TOKENS,
    fineweb_streaming: FinewebStreaming = True,
    shuffle_buffer: ShuffleBuffer = defaults.FINEWEB_SHUFFLE_BUFFER,
    gutenberg_train_tokens: GutenbergTrain = defaults.GUTENBERG_TRAIN_TOKENS,
    gutenberg_val_tokens: GutenbergVal = defaults.GUTENBERG_VAL_TOKENS,
    wikitext_config: WikitextConfig = None,
    roam: Roam = None,
    primer: Primer = None,
    roam_val_frac: RoamValFrac = defaults.ROAM_VAL_FRAC,
    notes_split: NotesSplit = "shared_text",
    val_frac: ValFrac = defaults.SFT_VAL_FRAC,
    note_options: NoteOptions = NoteOptions(),
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    config: Config = None,
    offline: OfflineOption = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build all caches: fineweb-edu, notes, wikitext, gutenberg; dolly, oasst1, primer."""
    from niels_gpt.cache.sources.texts import BuildSettings
    from niels_gpt.config.yaml_file import load_config

    data = load_config(config).data
    settings = BuildSettings(
        **_place(cache_dir),
        seed=seed,
        shard_bytes=shard_bytes,
        fineweb_id=fineweb_id,
        fineweb_config=fineweb_config,
        fineweb_train_tokens=fineweb_train_tokens,
        fineweb_val_tokens=fineweb_val_tokens,
        fineweb_streaming=fineweb_streaming,
        shuffle_buffer=shuffle_buffer,
        gutenberg_train_tokens=gutenberg_train_tokens,
        gutenberg_val_tokens=gutenberg_val_tokens,
        wikitext_config=wikitext_config,
        roam=roam,
        primer=primer,
        roam_val_frac=roam_val_frac,
        roam_split=notes_split,
        val_frac=val_frac,
        errors=note_options.encoding_errors or data.encoding_errors,
        notes=note_options.notes(data.notes),
        vocab_size=vocab_size,
        tokenizer_documents=tokenizer_documents,
        workers=threads,
    )
    _run_build(
        settings,
        names=None,
        only=only,
        skip=skip,
        tokenizer=tokenizer,
        config=config,
        force=force,
        as_json=json,
        executor=_executor(engine, address, threads),
    )


@app.command("build")
@takes_note_options
def build(
    names: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Sources; see `niels-gpt data list`.")],
    cache_dir: CacheDir = Path("cache"),
    seed: Seed = defaults.SEED,
    path: Annotated[
        OptionalPath,
        typer.Option(
            "--path", parser=location, help="Files of the source (only with one NAME); a URL for your own sources."
        ),
    ] = None,
    subset: Annotated[OptionalText, typer.Option("--subset", help="Config of wikitext or fineweb-edu.")] = None,
    train_tokens: Annotated[
        OptionalInt, typer.Option("--train-tokens", min=1, help="Maximum, for fineweb-edu or gutenberg.")
    ] = None,
    val_tokens: Annotated[
        OptionalInt, typer.Option("--val-tokens", min=0, help="Maximum, for fineweb-edu or gutenberg.")
    ] = None,
    shuffle_buffer: ShuffleBuffer = defaults.FINEWEB_SHUFFLE_BUFFER,
    val_frac: Annotated[
        float, typer.Option("--val-frac", help="Held-out fraction of notes, documents or examples.")
    ] = 0.1,
    notes_split: NotesSplit = "shared_text",
    test: Annotated[bool, typer.Option("--test", help="Also build the test split of wikitext.")] = False,
    tokenizer: TokenizerPath = None,
    vocab_size: VocabSize = defaults.VOCAB_SIZE,
    tokenizer_documents: TokenizerDocuments = defaults.TOKENIZER_DOCUMENTS,
    shard_bytes: ShardBytes = defaults.SHARD_BYTES,
    note_options: NoteOptions = NoteOptions(),
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    config: Config = None,
    offline: OfflineOption = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build the caches of the named sources, your own included."""
    from niels_gpt.cache.sources.texts import BuildSettings
    from niels_gpt.config.yaml_file import load_config

    if path is not None and len(names) > 1:
        raise ValueError("--path needs exactly one source: build them one after the other")
    if test and set(names) != {"wikitext"}:
        raise ValueError("--test needs wikitext alone: no other source has a test split")
    for option, value, apply_to in (
        ("--subset", subset, WITH_SUBSETS),
        ("--train-tokens", train_tokens, TOKEN_BUDGETS),
        ("--val-tokens", val_tokens, TOKEN_BUDGETS),
    ):
        if value is not None and not set(names) & set(apply_to):
            raise ValueError(f"{option} applies to {' and '.join(apply_to)} only, not to {', '.join(names)}: omit it")
    data = load_config(config).data
    settings = BuildSettings(
        **_place(cache_dir),
        seed=seed,
        shard_bytes=shard_bytes,
        fineweb_config=subset or defaults.FINEWEB_CONFIG,
        fineweb_train_tokens=defaults.FINEWEB_TRAIN_TOKENS if train_tokens is None else train_tokens,
        fineweb_val_tokens=defaults.FINEWEB_VAL_TOKENS if val_tokens is None else val_tokens,
        shuffle_buffer=shuffle_buffer,
        gutenberg_train_tokens=defaults.GUTENBERG_TRAIN_TOKENS if train_tokens is None else train_tokens,
        gutenberg_val_tokens=defaults.GUTENBERG_VAL_TOKENS if val_tokens is None else val_tokens,
        wikitext_config=subset,
        path=path,
        roam_val_frac=val_frac,
        roam_split=notes_split,
        val_frac=val_frac,
        test=test,
        errors=note_options.encoding_errors or data.encoding_errors,
        notes=note_options.notes(data.notes),
        vocab_size=vocab_size,
        tokenizer_documents=tokenizer_documents,
        workers=threads,
    )
    _run_build(
        settings,
        names=names,
        only=[],
        skip=[],
        tokenizer=tokenizer,
        config=config,
        force=force,
        as_json=json,
        executor=_executor(engine, address, threads),
    )


def _place(cache_dir: Path | str) -> dict[str, Any]:
    """The settings of --cache-dir. For a URL, caches are built in a local folder and copied to the URL."""
    if isinstance(cache_dir, Path):
        return {"cache_dir": cache_dir}
    from niels_gpt.cache import remote

    remote.check_writable(cache_dir)
    folder = remote.staging_folder(cache_dir)
    remote.fetch_tokenizer(cache_dir, folder)
    return {"cache_dir": folder, "url": cache_dir}


def _executor(engine: str, address: str | None, threads: int | None) -> contextlib.AbstractContextManager[Executor]:
    """The executor of --engine, to be entered. Raises ValueError for an unknown engine."""
    from niels_gpt.system.executors import ThreadExecutor

    if engine == "threads":
        if address is not None:
            raise ValueError("--address is that of a Ray cluster: add --engine ray, or omit it")
        return contextlib.nullcontext(ThreadExecutor(threads))
    if engine != "ray":
        raise ValueError(f"--engine must be threads or ray, got {engine!r}")
    if address is not None and threads is not None:
        raise ValueError("--threads is the number of CPUs of a local Ray cluster: omit it, or --address")
    from niels_gpt.plugins.ray_cluster import RayExecutor

    return RayExecutor(address, same_versions=("sentencepiece", "numpy"), cpus=threads)


def _run_build(
    settings: BuildSettings,
    *,
    names: list[str] | None,
    only: list[str],
    skip: list[str],
    tokenizer: Path | None,
    config: Path | None,
    force: bool,
    as_json: bool,
    executor: contextlib.AbstractContextManager[Executor],
) -> None:
    """Build the caches of these sources (None: all), one after the other; failures are reported at the end."""
    from niels_gpt.cache.sources.build import choose_sources
    from niels_gpt.cache.sources.texts import shared_lines_of_notes
    from niels_gpt.data.note_selection import selection_lines
    from niels_gpt.system.terminal import rich_console

    console = rich_console(highlight=False, stderr=as_json)
    if not console.is_terminal:  # a pipe has no width
        console.width = 120
    chosen = choose_sources(names, only, skip, config, settings)
    results = _build_all(settings, chosen, tokenizer, console, executor, force=force, all_sources=names is None)
    if as_json:
        print(json_format.dumps([_as_json(result) for result in results], indent=2, ensure_ascii=False))
    else:
        selections = {r.name: r.selected for r in results if r.selected is not None and not r.selected.is_embedded}
        for line in selection_lines(selections):
            console.print(line, markup=False, soft_wrap=True)
        if any(result.name == "roam" and result.state == "built" for result in results):
            console.print(f"roam: {shared_lines_of_notes(settings)}", markup=False, soft_wrap=True)
        _print_results(console, results)
    for result in (r for r in results if r.reason and not as_json):
        print(f"{result.name}: {result.state}: {_without_name(result.reason, result.name)}", file=sys.stderr)
    failed = sum(result.state == "failed" for result in results)
    if failed:
        available = sum(result.state in ("built", "up to date") for result in results)
        optional = len(results) - failed - available
        rest = f", {optional} optional not built" if optional else ""
        print(
            f"error: {failed} of {len(results)} caches could not be built; {available} available{rest}", file=sys.stderr
        )
        sys.exit(PARTIAL if available else 1)


def _build_all(
    settings: BuildSettings,
    chosen: list[Source],
    tokenizer: Path | None,
    console: Console,
    executor: contextlib.AbstractContextManager[Executor],
    *,
    force: bool,
    all_sources: bool,
) -> list[BuildResult]:
    """Build the caches one after the other; exits with code 130 after Ctrl-C."""
    unreadable: dict[str, Exception] = {}
    interrupted = "nothing was built yet"
    try:
        with executor as entered:
            settings = dataclasses.replace(settings, executor=entered)
            shared = _prepare_tokenizer(settings, tokenizer, chosen, unreadable, console)
            interrupted = "run the same command to resume from the last complete shard"
            return [
                _build_one(source, settings, shared, unreadable, force=force, all_sources=all_sources)
                for source in chosen
            ]
    except KeyboardInterrupt:
        print(f"\ninterrupted: {interrupted}", file=sys.stderr)
        sys.exit(130)


def _prepare_tokenizer(
    settings: BuildSettings,
    given: Path | None,
    chosen: list[Source],
    unreadable: dict[str, Exception],
    console: Console,
) -> SubwordTokenizer:
    """The tokenizer of the cache folder: installed, opened, or trained; `unreadable` gets the sources it failed on.

    Several builds into one new folder train one tokenizer: the first trains, the others wait for it.
    """
    from rich.markup import escape

    from niels_gpt.cache.sources.build import (
        check_lost_tokenizer,
        check_vocab_size,
        install_tokenizer,
        open_tokenizer,
        train_on,
    )
    from niels_gpt.system.progress import status_line
    from niels_gpt.tokenizer import has_tokenizer

    with _one_new_tokenizer(settings.cache_dir):
        new = not has_tokenizer(settings.cache_dir / "tokenizer")
        if new:
            check_lost_tokenizer(settings.cache_dir, chosen, given)
        check_vocab_size(settings, given)
        if given is not None or not new:
            installed = (
                open_tokenizer(settings.cache_dir) if given is None else install_tokenizer(given, settings.cache_dir)
            )
            if installed.loss_notice is not None:
                print(f"note: {installed.loss_notice}", file=sys.stderr)
            return installed if given is None else _published(installed, settings)
        began = time.monotonic()
        listed = ", ".join(source.name for source in chosen)
        console.print(
            f"training a tokenizer of {settings.vocab_size or defaults.VOCAB_SIZE:,} subwords on {escape(listed)}"
        )
        with status_line("training") as show:
            try:
                trained = train_on(
                    chosen, settings, lambda source, err: unreadable.update({source.name: err}), show=show
                )
            except ValueError as err:
                if len(unreadable) < len(chosen):
                    raise
                reasons = "; ".join(
                    f"{name}: {_without_name(error_message(reason), name)}" for name, reason in unreadable.items()
                )
                raise ValueError(f"no source can be read. {reasons}") from err
        console.print(f"tokenizer: {trained.vocab_size:,} ids, in {format_duration(time.monotonic() - began)}")
        if unreadable:
            print(
                f"warning: the tokenizer was trained without {', '.join(unreadable)}, which cannot be read now. "
                f"To train it on them later, remove {settings.place} and build again: all its caches share it",
                file=sys.stderr,
            )
        return _published(trained, settings)


def _published(tokenizer: SubwordTokenizer, settings: BuildSettings) -> SubwordTokenizer:
    """The tokenizer, which is copied to the URL of the caches if they have one."""
    if settings.url is not None:
        from niels_gpt.cache.remote import publish_tokenizer

        publish_tokenizer(settings.cache_dir, settings.url)
    return tokenizer


@contextlib.contextmanager
def _one_new_tokenizer(cache_dir: Path) -> Iterator[None]:
    """Let one build at a time create the tokenizer of a folder; do nothing if there is one."""
    from niels_gpt.system import files
    from niels_gpt.tokenizer import has_tokenizer

    if has_tokenizer(cache_dir / "tokenizer"):
        yield
        return
    files.check_output_path(cache_dir, "--cache-dir", folder=True)
    path = cache_dir / "tokenizer.lock"
    with files.lock(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # whoever waits for it then finds the tokenizer


def _without_name(reason: str, name: str) -> str:
    """The reason without the name of its source, which the line already begins with."""
    return reason.removeprefix(f"data.sources.{name}: ")


def _build_one(
    source: Source,
    settings: BuildSettings,
    tokenizer: SubwordTokenizer,
    unreadable: dict[str, Exception],
    *,
    force: bool,
    all_sources: bool,
) -> BuildResult:
    """Build one cache; an error becomes the reason of its result, so that the other caches are still built."""
    from niels_gpt.cache.sources import build as sources_build
    from niels_gpt.cache.sources.progress import show_progress
    from niels_gpt.data.reading.local import DataUnavailable

    try:
        if source.name in unreadable:
            raise unreadable[source.name]
        with show_progress(source.name) as on_progress:
            built = sources_build.build(source, settings, tokenizer, force=force, on_progress=on_progress)
            return dataclasses.replace(built, location=sources_build.location_of(built.folder, settings))
    except (OSError, ValueError) as err:
        reason = error_message(err) + _budget_remedy(err, source, all_sources=all_sources)
        if all_sources and source.name in sources_build.OPTIONAL and isinstance(err, DataUnavailable):
            return sources_build.write_placeholder(source, settings, reason)
        folder = sources_build.folder_of(source, settings.cache_dir)
        return sources_build.BuildResult(source.name, folder, "failed", {}, reason)


def _budget_remedy(err: Exception, source: Source, *, all_sources: bool) -> str:
    """The option to change if a token budget leaves train empty."""
    from niels_gpt.cache.build_cache import TrainEmpty

    if not isinstance(err, TrainEmpty) or not err.budget or source.name not in TOKEN_BUDGETS:
        return ""
    option = f"--{TOKEN_BUDGETS[source.name] + '-' if all_sources else ''}{err.budget}-tokens"
    return f": use a {'larger' if err.budget == 'train' else 'smaller'} {option}"


def _print_results(console: Console, results: list[BuildResult]) -> None:
    from rich.table import Table

    from niels_gpt.cache.formats import splits_of

    table = Table(box=None, pad_edge=False)
    splits = max((splits_of(result.meta) for result in results), key=len)
    for name in ("cache", "", "train", "held out", *splits[2:], "dropped"):
        table.add_column(name, justify="left" if name in ("cache", "") else "right", no_wrap=True)
    for result in results:
        meta = result.meta
        dropped = f"{sum(meta['dropped'].values()):,}" if isinstance(meta.get("dropped"), dict) else ""
        table.add_row(result.name, result.state, *(_split_size(meta, split) for split in splits), dropped)
    console.print(table)


def _as_json(result: BuildResult) -> dict[str, Any]:
    totals = {k: v for k, v in result.meta.items() if k.endswith(("_tokens", "_examples", "_documents"))}
    listed = {
        "name": result.name,
        "state": result.state,
        "folder": result.location or str(result.folder),
        "reason": result.reason,
    }
    if result.selected is not None and not result.selected.is_embedded:
        listed["selection"] = result.selected.summary()
    return listed | totals


def _split_size(meta: dict[str, Any], split: str) -> str:
    if f"{split}_tokens" not in meta:
        return ""
    tokens = f"{short_number(meta[f'{split}_tokens'])} tokens"
    return f"{meta[f'{split}_examples']:,} examples, {tokens}" if f"{split}_examples" in meta else tokens


@app.command("verify")
def verify(path: CachePath = Path("cache"), json: Json = False) -> None:
    """Hash every file again and name the first damaged one."""
    from niels_gpt.cache.copies import url_of
    from niels_gpt.cache.formats import dtype_name
    from niels_gpt.cache.meta import dtype_of, read_meta
    from niels_gpt.cache.remote import local_folder, named_as
    from niels_gpt.cache.verify import verify_cache
    from niels_gpt.system.progress import status_line

    with status_line("verifying") as show:
        local = local_folder(path, fresh=True)
        with named_as(path, local):
            verified = verify_cache(
                local, on_file=lambda file: show(f"verifying {str(file).replace(str(local), str(path))}")
            )
    if json:
        print(json_format.dumps([str(url_of(folder)) for folder in verified]))
        return
    for folder in verified:
        meta = read_meta(folder / "meta.json")
        size = sum(entry["bytes"] for entry in meta["files"].values())
        dtype = dtype_name(dtype_of(meta, folder))
        print(f"{url_of(folder)}: {len(meta['files'])} files, {short_number(size)}B, {dtype}, verified")


@app.command("inspect")
def inspect(
    path: CachePath = Path("cache"),
    split: Annotated[str, typer.Option("--split", help="train, val, or test.")] = "train",
    seed: Annotated[OptionalInt, typer.Option("--seed", min=0, help="Seed of the sample; default: random.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Length of the decoded sample.")] = 80,
    tokenizer: Annotated[
        OptionalPath, typer.Option("--tokenizer", help="Default: tokenizer/ beside pretrain/ and sft/.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the metadata, the sizes and a decoded sample at a random offset."""
    from niels_gpt.cache.formats import SPLITS, TEST
    from niels_gpt.cache.remote import local_folder, named_as
    from niels_gpt.cache.verify import find_caches
    from niels_gpt.system.rng import seeded_or_random
    from niels_gpt.system.terminal import rich_console

    if split not in (*SPLITS, TEST):
        raise ValueError(f"--split must be train, val or test, got {split!r}")
    generator = seeded_or_random(seed)
    local = local_folder(path)
    with named_as(path, local):
        entries = [_inspect_cache(folder, split, generator, tokens, tokenizer) for folder in find_caches(local)]
    if json:
        print(json_format.dumps(entries, indent=2, ensure_ascii=False))
        return
    console = rich_console(highlight=False)
    for number, entry in enumerate(entries):
        if number:
            console.print()
        _print_inspected(console, entry)


def _inspect_cache(
    folder: Path, split: str, generator: torch.Generator, tokens: int, tokenizer: Path | None
) -> dict[str, Any]:
    """The meta of a cache and a decoded sample of it."""
    import torch

    from niels_gpt.cache.copies import url_of
    from niels_gpt.cache.formats import CacheError, splits_of
    from niels_gpt.cache.meta import read_meta, split_tokens
    from niels_gpt.cache.verify import stream_slice
    from niels_gpt.tokenizer import load_tokenizer

    meta = read_meta(folder / "meta.json")
    entry: dict[str, Any] = {"folder": str(url_of(folder)), "split": split, "meta": meta}
    if split not in splits_of(meta):
        raise CacheError(f"{folder} has no {split} split: --split must be one of {', '.join(splits_of(meta))}")
    if meta.get("built") is False:
        return entry
    total = split_tokens(meta, folder, split)
    if not total:
        return entry
    path = tokenizer or folder.resolve().parent.parent / "tokenizer"
    try:
        decoder = load_tokenizer(path)
    except FileNotFoundError:
        raise CacheError(f"{folder}: no tokenizer at {path} to decode it; pass --tokenizer") from None
    if meta.get("tokenizer_sha256") not in (None, decoder.sha256):
        raise CacheError(f"{folder} was built with another tokenizer than {path}; pass --tokenizer")
    start = int(torch.randint(max(total - tokens, 0) + 1, (1,), generator=generator))
    ids = stream_slice(folder, split, start, tokens)
    return entry | {"token": start, "ids": ids.tolist(), "text": decoder.decode(ids), "shown": decoder.render(ids)}


def _print_inspected(console: Console, entry: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from niels_gpt.cache.meta import listed_files

    meta = entry["meta"]
    listed = listed_files(meta, Path(entry["folder"]))
    console.print(Text(entry["folder"], style="bold"), soft_wrap=True)
    if meta.get("built") is False:
        console.print(f"not built: {meta.get('reason')}", markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("files", f"{len(listed)}, {short_number(sum(item['bytes'] for item in listed.values()))}B")
    for key, value in meta.items():
        if key not in ("files", "format", "split_rule"):
            table.add_row(key, escape(_readable(key, value)))
    table.add_row("split_rule", escape(str(meta.get("split_rule"))))
    console.print(table)
    if "text" in entry:
        console.print(f"\n{entry['split']}, from token {entry['token']:,} on:")
        console.print(Text(entry["shown"], style="green"), soft_wrap=True)


def _readable(key: str, value: Any) -> str:
    """A value of the meta for people: hashes are shortened (--json prints them in full)."""
    from niels_gpt.cache.formats import NO_LIMIT

    if isinstance(value, dict):
        return ", ".join(f"{name}: {_readable(name, inner)}" for name, inner in value.items()) or "none"
    if key.endswith("sha256") and isinstance(value, str):
        return f"{value[:12]}..."
    if type(value) is int and key != "seed":
        return "no limit" if value == NO_LIMIT else f"{value:,}"
    return "none" if value is None else str(value)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(parser=location, help="A cache; a path or a URL.")],
    second: Annotated[Path, typer.Argument(parser=location, help="The cache to compare it with.")],
    json: Json = False,
) -> None:
    """Explain how two caches differ; exit code 1 if they do."""
    from niels_gpt.cache.remote import local_folder, named_as
    from niels_gpt.cache.verify import differences

    a, b = local_folder(first), local_folder(second)
    with named_as(first, a), named_as(second, b):
        found = list(differences(a, b))
    found = [line.replace(str(a), str(first)).replace(str(b), str(second)) for line in found]
    if json:
        print(json_format.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(found) if found else f"{first} and {second} are identical")
    if found:
        sys.exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line as it was specified: with notes held out one by one; `run_app` documents the exit codes."""
    by_file = {name: {"notes_split": "file"} for name in ("build-all", "build")}
    run_app(functools.partial(app, default_map=by_file), arguments, name="python -m niels_gpt.cache.cli")


if __name__ == "__main__":
    main()
