"""`niels-gpt`: the commands and their options.

Only typer is imported here; a command imports what it works with when it runs, so that `--help` is
instant. Mistakes of the user end in one line on stderr and exit code 1, without a traceback
(NIELS_GPT_DEBUG=1 shows it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from niels_gpt.cache.cli import app as cache_app
from niels_gpt.terminal import run_app

app = typer.Typer(
    help="A personal language-model workbench: your notes and public text in, your own small GPT out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
batch_app = typer.Typer(help="Look at what a training step learned from.", no_args_is_help=True)
app.add_typer(batch_app, name="batch")
data_app = typer.Typer(help="The sources of text: which there are, and what is in them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(cache_app, name="cache")
tokenizer_app = typer.Typer(help="Train a tokenizer, and see how well it fits.", no_args_is_help=True)
app.add_typer(tokenizer_app, name="tokenizer")

Text = Optional[str]  # noqa: UP045 (typer reads these at run time)
Count = Optional[int]  # noqa: UP045
Share = Optional[float]  # noqa: UP045
Place = Optional[Path]  # noqa: UP045

RunOption = Annotated[Place, typer.Option("--run", help="Run folder; default: the newest in runs/.")]
CheckpointOption = Annotated[Place, typer.Option("--checkpoint", help="A .pt file instead of a run's best one.")]
TokenizerOption = Annotated[
    Place, typer.Option("--tokenizer", help="The model's tokenizer; default: tokenizer.model of the run.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
WikiOption = Annotated[Text, typer.Option("--wiki", help="hub, embedded, or a folder with wikitext files.")]
RoamOption = Annotated[Text, typer.Option("--roam", help="Your folder of markdown notes, or embedded.")]
PrimerOption = Annotated[Text, typer.Option("--primer", help="Your file of dialogues, or embedded.")]
EncodingOption = Annotated[
    Text, typer.Option("--encoding-errors", help="Files that are not utf-8: strict (stop) or replace (go on).")
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a config value, e.g. train.base_lr=1e-3.")
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy; higher is wilder.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Only the k likeliest tokens; 0 for all.")]
TopPOption = Annotated[Share, typer.Option("--top-p", help="Only the likeliest tokens that make up this share.")]
MinPOption = Annotated[Share, typer.Option("--min-p", help="Only tokens at least this likely, next to the likeliest.")]
SeedOption = Annotated[Count, typer.Option("--seed", help="For the same text again.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Longest continuation, in tokens (or bytes).")
]
SplitOption = Annotated[str, typer.Option("--split", help="train, validation, test: what the source has.")]
SubsetOption = Annotated[Text, typer.Option("--subset", help="The dataset's config, e.g. wikitext-2-raw-v1.")]
PathOption = Annotated[Place, typer.Option("--path", help="A local file or folder with the source's rows.")]
SourceConfigOption = Annotated[
    Place, typer.Option("--config", help="YAML file with sources of your own (data.sources).")
]


def _go_offline(offline: bool) -> bool:
    if offline:
        from niels_gpt.data.hub import go_offline

        go_offline()
    return offline


OfflineOption = Annotated[
    bool, typer.Option("--offline", callback=_go_offline, help="Never ask the Hub: local files and caches only.")
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from niels_gpt import __version__

        typer.echo(f"niels-gpt {__version__}")
        raise typer.Exit


@app.command()
def demo(
    steps: Annotated[Count, typer.Option("--steps", min=1, help="Updates to train for.")] = None,
    run_dir: Annotated[Place, typer.Option("--run-dir", help="Default: runs/demo, runs/demo-2, ...")] = None,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Train, measure and talk to a small model, offline, in about two minutes on two CPU cores."""
    from niels_gpt.cli.demo import run_demo

    run_demo(steps=steps, run_dir=run_dir, wiki=wiki, roam=roam, primer=primer, device=device)


@app.command()
def train(
    config: Annotated[Place, typer.Option("--config", help="YAML file; default: the v0 model.")] = None,
    run_dir: Annotated[Place, typer.Option("--run-dir", help="Folder of the run; default: a new one in runs/.")] = None,
    steps: Annotated[Count, typer.Option("--steps", min=1, help="Same as --set train.total_steps=N.")] = None,
    checkpoint_every: Annotated[
        Count, typer.Option("--checkpoint-every", min=1, help="Same as --set output.checkpoint_every=K.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --run-dir.")] = False,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    encoding_errors: EncodingOption = None,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config and stop.")] = False,
    allow_data_change: Annotated[bool, typer.Option("--allow-data-change", help="Resume on other data.")] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="Resume with other training settings.")
    ] = False,
) -> None:
    """Train a model, or go on with one."""
    from niels_gpt.cli.training import run_train

    overrides = list(set_)
    overrides += [f"train.total_steps={steps}"] if steps is not None else []
    overrides += [f"output.checkpoint_every={checkpoint_every}"] if checkpoint_every is not None else []
    run_train(
        config=config,
        run_dir=run_dir,
        resume=resume,
        overrides=overrides,
        data={"wiki": wiki, "roam": roam, "primer": primer, "encoding_errors": encoding_errors},
        device=device,
        print_config=print_config,
        allow_data_change=allow_data_change,
        allow_config_change=allow_config_change,
    )


@app.command()
def pipeline(
    config: Annotated[
        Place, typer.Option("--config", help="YAML file with sections data, pretrain and sft; default: the v1 model.")
    ] = None,
    run_dir: Annotated[Place, typer.Option("--run-dir", help="Folder of both runs; default: a new one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where --run-dir stopped.")] = False,
    set_: SetOption = [],  # noqa: B006
    token_cache: Annotated[Place, typer.Option("--token-cache", help="Folder of token caches; default: cache.")] = None,
    device: DeviceOption = "auto",
    print_config: Annotated[bool, typer.Option("--print-config", help="Print both configs and stop.")] = False,
) -> None:
    """Pretrain on token caches, then fine-tune for chat: a best checkpoint for each."""
    from niels_gpt.cli.pipeline import run_pipeline

    run_pipeline(
        config=config,
        run_dir=run_dir,
        resume=resume,
        overrides=list(set_),
        token_cache=token_cache,
        device=device,
        print_config=print_config,
    )


@app.command("eval")
def eval_(
    run: RunOption = None,
    checkpoint: CheckpointOption = None,
    stride: Annotated[
        Count, typer.Option("--stride", min=1, help="Start a window every N bytes (default T): less is exacter.")
    ] = None,
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    encoding_errors: EncodingOption = None,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    token_cache: Annotated[
        Place, typer.Option("--token-cache", help="Folder of token caches, for a model with a tokenizer.")
    ] = None,
    limit: Annotated[
        Count, typer.Option("--limit", min=2, help="Only the first N bytes or tokens of each held-out set.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Score every held-out byte, next to what gzip, xz and byte frequencies reach on the same bytes."""
    from niels_gpt.cli.measuring import run_eval

    run_eval(
        run=run,
        checkpoint=checkpoint,
        stride=stride,
        data={"wiki": wiki, "roam": roam, "primer": primer, "encoding_errors": encoding_errors},
        device=device,
        tokenizer=tokenizer,
        token_cache=token_cache,
        limit=limit,
        as_json=json,
    )


@app.command("generate")
def generate_(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    run: RunOption = None,
    checkpoint: CheckpointOption = None,
    max_tokens: MaxTokensOption = 200,
    temperature: TemperatureOption = 0.9,
    top_k: TopKOption = 50,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    stop: Annotated[list[str], typer.Option("--stop", help="End before this text; may be repeated.")] = [],  # noqa: B006
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many continuations.")] = 1,
    seed: SeedOption = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the KV cache.")] = True,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Continue a text."""
    from niels_gpt.cli.talking import run_generate, sampling

    run_generate(
        prompt=prompt,
        run=run,
        checkpoint=checkpoint,
        max_tokens=max_tokens,
        sampling=sampling(temperature, top_k, top_p, min_p),
        stop=stop,
        number=number,
        seed=seed,
        cache=cache,
        device=device,
        tokenizer=tokenizer,
        as_json=json,
    )


@app.command()
def chat(
    run: RunOption = None,
    checkpoint: CheckpointOption = None,
    system: Annotated[Text, typer.Option("--system", help="A system message to begin with.")] = None,
    max_tokens: MaxTokensOption = 200,
    temperature: TemperatureOption = 0.3,
    top_k: TopKOption = 50,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
) -> None:
    """Talk to a model: /system TEXT, /reset, /exit."""
    from niels_gpt.cli.talking import run_chat, sampling

    run_chat(
        run=run,
        checkpoint=checkpoint,
        system=system,
        max_tokens=max_tokens,
        sampling=sampling(temperature, top_k, top_p, min_p),
        seed=seed,
        device=device,
        tokenizer=tokenizer,
    )


@batch_app.command("show")
def batch_show(
    step: Annotated[int, typer.Option("--step", min=0, help="Training step, from 0.")],
    run: RunOption = None,
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters of text per row; 0 for all.")] = 160,
    json: JsonOption = False,
) -> None:
    """Print source, document, offset and text of every row of a training step."""
    from niels_gpt.cli.measuring import run_batch_show

    run_batch_show(run=run, step=step, chars=chars, as_json=json)


@data_app.command("list")
def data_list(config: SourceConfigOption = None, offline: OfflineOption = False, json: JsonOption = False) -> None:
    """Name, kind, id and licence of every source, and where it would come from now."""
    from niels_gpt.cli.sources import run_list

    run_list(config=config, as_json=json)


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A source of `niels-gpt data list`.")],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many samples.")] = 3,
    split: SplitOption = "train",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Not the first ones.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For --shuffle.")] = 42,
    subset: SubsetOption = None,
    path: PathOption = None,
    encoding_errors: EncodingOption = None,
    config: SourceConfigOption = None,
    chars: Annotated[int, typer.Option("--chars", min=0, help="Characters per text or message; 0 for all.")] = 400,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Print samples of a source; with --json one per line."""
    from niels_gpt.cli.sources import run_show

    run_show(
        name=name,
        number=number,
        split=split,
        shuffle=shuffle,
        seed=seed,
        subset=subset,
        path=path,
        errors=encoding_errors,
        config=config,
        chars=chars,
        as_json=json,
    )


@data_app.command("stats")
def data_stats(
    name: Annotated[str, typer.Argument(help="A source of `niels-gpt data list`.")],
    take: Annotated[
        Count, typer.Option("--take", min=1, help="Only so many samples; default: all, or 10,000 of a huge one.")
    ] = None,
    split: SplitOption = "train",
    subset: SubsetOption = None,
    path: PathOption = None,
    encoding_errors: EncodingOption = None,
    config: SourceConfigOption = None,
    png: Annotated[
        Place, typer.Option("--png", help="Where to write the histogram; default: data/stats/NAME.png.")
    ] = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Samples, characters, languages, lengths, roles and turns of a source."""
    from niels_gpt.cli.sources import run_stats

    run_stats(
        name=name,
        take=take,
        split=split,
        subset=subset,
        path=path,
        errors=encoding_errors,
        config=config,
        png=png,
        as_json=json,
    )


@data_app.command("lint")
def data_lint(
    names: Annotated[list[str], typer.Argument(metavar="[NAME]...", help="SFT caches; default: all.")] = [],  # noqa: B006
    cache_dir: Annotated[Path, typer.Option("--cache-dir", help="Folder of token caches.")] = Path("cache"),
    context: Annotated[
        int, typer.Option("-T", "--context", min=1, help="Context length that examples are cut to.")
    ] = 1024,
    split: Annotated[str, typer.Option("--split", help="train or val.")] = "train",
    example: Annotated[
        Count, typer.Option("--example", min=0, help="Which example to show; default: a random one.")
    ] = None,
    seed: Annotated[Count, typer.Option("--seed", min=0, help="For the same example again.")] = None,
    json: JsonOption = False,
) -> None:
    """Count the supervised tokens of every SFT cache, show one example, refuse data without any."""
    from niels_gpt.cli.linting import run_lint

    if split not in ("train", "val"):
        raise ValueError(f"--split must be train or val, got {split!r}")
    run_lint(names=names, cache_dir=cache_dir, T=context, split=split, example=example, seed=seed, as_json=json)


@tokenizer_app.command("train")
def tokenizer_train(
    names: Annotated[
        list[str], typer.Argument(metavar="[SOURCE]...", help="Sources to learn from; default: all that can be read.")
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option("--out", help="Folder for spm.model and meta.json.")] = Path("cache/tokenizer"),
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Pieces, without the special tokens.")] = 16_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seeds the sample that is learned from.")] = 42,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents per source, at most.")] = 20_000,
    path: PathOption = None,
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a tokenizer that is there.")] = False,
) -> None:
    """Train a SentencePiece tokenizer."""
    from niels_gpt.cli.tokenizing import run_train

    run_train(
        names=names,
        out=out,
        vocab_size=vocab_size,
        seed=seed,
        documents=documents,
        path=path,
        config=config,
        force=force,
    )


@tokenizer_app.command("report")
def tokenizer_report(
    names: Annotated[
        list[str], typer.Argument(metavar="[SOURCE]...", help="Sources to measure; default: all that can be read.")
    ] = [],  # noqa: B006
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="A spm.model, or its folder.")] = Path(
        "cache/tokenizer"
    ),
    take: Annotated[int, typer.Option("--take", min=1, help="Texts per source.")] = 2000,
    path: PathOption = None,
    config: SourceConfigOption = None,
    offline: OfflineOption = False,
    json: JsonOption = False,
) -> None:
    """Bytes per token by source, next to GPT-2's and to bytes; the longest pieces; pieces that are not used."""
    from niels_gpt.cli.tokenizing import run_report

    run_report(names=names, tokenizer=tokenizer, take=take, path=path, config=config, as_json=json)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    run_app(app, arguments, name="niels-gpt")
