"""`niels-gpt cache ...`, also as `python -m niels_gpt.cache.cli ...`: the options.

Only typer is imported here; what a command does is in `commands.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from niels_gpt.cache.sources import defaults
from niels_gpt.system.console import run_app

app = typer.Typer(
    help="Token caches: tokenise once, verify always, train from disk.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

Text = Optional[str]  # noqa: UP045 (typer reads these at run time)
Count = Optional[int]  # noqa: UP045
Place = Optional[Path]  # noqa: UP045


def _go_offline(offline: bool) -> bool:
    if offline:
        from niels_gpt.data.reading.hub import go_offline

        go_offline()
    return offline


CacheDir = Annotated[Path, typer.Option("--cache-dir", help="Folder of all caches and their tokenizer.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seeds splits, shuffles and the tokenizer's sample.")]
TokenizerPath = Annotated[
    Place, typer.Option("--tokenizer", help="A spm.model to use; default: that of --cache-dir, or a new one.")
]
VocabSize = Annotated[int, typer.Option("--vocab-size", help="Pieces of a new tokenizer, without the special tokens.")]
TokenizerDocuments = Annotated[
    int, typer.Option("--tokenizer-documents", min=1, help="Documents per source that a new tokenizer learns from.")
]
ShardBytes = Annotated[int, typer.Option("--shard-bytes", help="Size of a pretrain shard.")]
FinewebId = Annotated[Text, typer.Option("--fineweb-id", help="Hub id of fineweb-edu.")]
FinewebConfig = Annotated[str, typer.Option("--fineweb-config", help="Config of fineweb-edu.")]
FinewebTrain = Annotated[
    int, typer.Option("--fineweb-train-tokens", min=0, help="Training tokens of fineweb-edu, at most.")
]
FinewebVal = Annotated[
    int, typer.Option("--fineweb-val-tokens", min=0, help="Held-out tokens of fineweb-edu, at most.")
]
FinewebStreaming = Annotated[
    bool, typer.Option("--fineweb-streaming/--no-fineweb-streaming", help="Stream it, or download all of the config.")
]
ShuffleBuffer = Annotated[int, typer.Option("--shuffle-buffer", min=1, help="Rows of fineweb-edu's shuffle buffer.")]
GutenbergTrain = Annotated[
    int, typer.Option("--gutenberg-train-tokens", min=0, help="Training tokens of gutenberg, at most.")
]
GutenbergVal = Annotated[
    int, typer.Option("--gutenberg-val-tokens", min=0, help="Held-out tokens of gutenberg, at most.")
]
WikitextConfig = Annotated[Text, typer.Option("--wikitext-config", help="Default: wikitext-103-raw-v1.")]
Roam = Annotated[Place, typer.Option("--roam", help="Folder of notes; default: .roam-data/, else the embedded ones.")]
Primer = Annotated[
    Place, typer.Option("--primer", help="File of dialogues; default: data/primer.txt, else the embedded ones.")
]
RoamValFrac = Annotated[float, typer.Option("--roam-val-frac", help="Held-out share of the notes.")]
ValFrac = Annotated[float, typer.Option("--val-frac", help="Held-out share of the examples (and own documents).")]
Errors = Annotated[Text, typer.Option("--encoding-errors", help="Files that are not utf-8: strict or replace.")]
Workers = Annotated[Count, typer.Option("--workers", min=1, help="Encoding threads; default: all cores.")]
Config = Annotated[Place, typer.Option("--config", help="YAML file with sources of your own (data.sources).")]
Offline = Annotated[
    bool, typer.Option("--offline", callback=_go_offline, help="Never ask the Hub: local files and caches only.")
]
Force = Annotated[bool, typer.Option("--force", help="Build also what has not changed.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
CachePath = Annotated[Path, typer.Argument(help="A cache, or a folder of caches.")]


@app.command("build-all")
def build_all(
    cache_dir: CacheDir = Path("cache"),
    seed: Seed = defaults.SEED,
    only: Annotated[list[str], typer.Option("--only", help="Only this source; may be repeated.")] = [],  # noqa: B006
    skip: Annotated[list[str], typer.Option("--skip", help="Not this source; may be repeated.")] = [],  # noqa: B006
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
    val_frac: ValFrac = defaults.SFT_VAL_FRAC,
    encoding_errors: Errors = None,
    workers: Workers = None,
    config: Config = None,
    offline: Offline = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build every cache that can be built: fineweb-edu, notes, wikitext, gutenberg; dolly, oasst1, primer."""
    from niels_gpt.cache.commands import run_build
    from niels_gpt.cache.sources.texts import BuildSettings

    settings = BuildSettings(
        cache_dir=cache_dir,
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
        val_frac=val_frac,
        errors=encoding_errors,
        vocab_size=vocab_size,
        tokenizer_documents=tokenizer_documents,
        workers=workers,
    )
    run_build(settings, names=None, only=only, skip=skip, tokenizer=tokenizer, config=config, force=force, as_json=json)


@app.command("build")
def build(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Sources of `niels-gpt data list`.")],
    cache_dir: CacheDir = Path("cache"),
    seed: Seed = defaults.SEED,
    path: Annotated[Place, typer.Option("--path", help="Local files with the rows of the one source.")] = None,
    subset: Annotated[Text, typer.Option("--subset", help="Config of wikitext or fineweb-edu.")] = None,
    train_tokens: Annotated[
        Count, typer.Option("--train-tokens", min=1, help="At most; of fineweb-edu or gutenberg.")
    ] = None,
    val_tokens: Annotated[
        Count, typer.Option("--val-tokens", min=0, help="At most; of fineweb-edu or gutenberg.")
    ] = None,
    shuffle_buffer: ShuffleBuffer = defaults.FINEWEB_SHUFFLE_BUFFER,
    val_frac: Annotated[
        float, typer.Option("--val-frac", help="Held-out share of notes, documents or examples.")
    ] = 0.1,
    test: Annotated[bool, typer.Option("--test", help="Keep wikitext's own test split too.")] = False,
    tokenizer: TokenizerPath = None,
    vocab_size: VocabSize = defaults.VOCAB_SIZE,
    tokenizer_documents: TokenizerDocuments = defaults.TOKENIZER_DOCUMENTS,
    shard_bytes: ShardBytes = defaults.SHARD_BYTES,
    encoding_errors: Errors = None,
    workers: Workers = None,
    config: Config = None,
    offline: Offline = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build the caches of some sources, your own included."""
    from niels_gpt.cache.commands import run_build
    from niels_gpt.cache.sources.texts import BuildSettings

    if path is not None and len(names) > 1:
        raise ValueError("--path goes with one source; build them one after the other")
    if test and set(names) != {"wikitext"}:
        raise ValueError("--test goes with wikitext alone, which has a test split of its own")
    settings = BuildSettings(
        cache_dir=cache_dir,
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
        val_frac=val_frac,
        test=test,
        errors=encoding_errors,
        vocab_size=vocab_size,
        tokenizer_documents=tokenizer_documents,
        workers=workers,
    )
    run_build(settings, names=names, only=[], skip=[], tokenizer=tokenizer, config=config, force=force, as_json=json)


@app.command("verify")
def verify(path: CachePath = Path("cache"), json: Json = False) -> None:
    """Re-hash every file and name the first bad one."""
    from niels_gpt.cache.commands import run_verify

    run_verify(path, as_json=json)


@app.command("inspect")
def inspect(
    path: CachePath = Path("cache"),
    split: Annotated[str, typer.Option("--split", help="train, val, or test.")] = "train",
    seed: Annotated[Count, typer.Option("--seed", min=0, help="For the same sample again.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Length of the decoded sample.")] = 80,
    tokenizer: Annotated[Place, typer.Option("--tokenizer", help="Default: tokenizer/ beside the caches.")] = None,
    json: Json = False,
) -> None:
    """Show the meta, the sizes and a decoded sample at a random place."""
    from niels_gpt.cache.commands import run_inspect

    run_inspect(path, split=split, seed=seed, tokens=tokens, tokenizer=tokenizer, as_json=json)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(help="A cache.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    json: Json = False,
) -> None:
    """Say why two caches differ; exit code 1 if they do."""
    from niels_gpt.cache.commands import run_diff

    run_diff(first, second, as_json=json)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    run_app(app, arguments, name="python -m niels_gpt.cache.cli")


if __name__ == "__main__":
    main()
