"""`niels-gpt`: the commands and their options.

Only typer is imported here; a command imports what it works with when it runs, so that `--help` is
instant. Mistakes of the user end in one line on stderr and exit code 1, without a traceback
(NIELS_GPT_DEBUG=1 shows it).
"""

from __future__ import annotations

from typing import Annotated

import typer

from niels_gpt.cache.cli import app as cache_app
from niels_gpt.cli.audit import audit
from niels_gpt.cli.batch_app import app as batch_app
from niels_gpt.cli.data_app import app as data_app
from niels_gpt.cli.memorize import memorize
from niels_gpt.cli.options import (
    CheckpointOption,
    Count,
    DeviceOption,
    EncodingOption,
    JsonOption,
    MaxTokensOption,
    MinPOption,
    OfflineOption,
    Place,
    PrimerOption,
    RoamOption,
    RunOption,
    SeedOption,
    SetOption,
    SourceOption,
    TemperatureOption,
    Text,
    TokenizerOption,
    TopKOption,
    TopPOption,
    VerifyOption,
    WeightsOption,
    WikiOption,
)
from niels_gpt.cli.splice import app as splice_app
from niels_gpt.cli.tokenizer_app import app as tokenizer_app
from niels_gpt.system.console import run_app

app = typer.Typer(
    help="A personal language-model workbench: your notes and public text in, your own small GPT out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(batch_app, name="batch")
app.add_typer(data_app, name="data")
app.add_typer(cache_app, name="cache")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(splice_app, name="splice")


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
    """Train, measure and talk to a small model, offline, in two to three minutes on two fast cores."""
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
    resume_if_there: Annotated[
        bool, typer.Option("--resume-if-there", help="Go on if --run-dir holds a run, else begin one: for batch jobs.")
    ] = False,
    set_: SetOption = [],  # noqa: B006
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    source: SourceOption = [],  # noqa: B006
    encoding_errors: EncodingOption = None,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in every run, on CUDA too; slower.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved config and stop.")] = False,
    verify: VerifyOption = False,
    allow_data_change: Annotated[bool, typer.Option("--allow-data-change", help="Resume on other data.")] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="Resume with other training settings.")
    ] = False,
) -> None:
    """Train a model, or go on with one."""
    from niels_gpt.cli.train import run_train

    overrides = list(set_)
    overrides += [f"train.total_steps={steps}"] if steps is not None else []
    overrides += [f"output.checkpoint_every={checkpoint_every}"] if checkpoint_every is not None else []
    overrides += ["engine.deterministic=true"] if deterministic else []
    run_train(
        config=config,
        run_dir=run_dir,
        resume=resume,
        resume_if_there=resume_if_there,
        overrides=overrides,
        data={"wiki": wiki, "roam": roam, "primer": primer, "encoding_errors": encoding_errors},
        sources=source,
        device=device,
        print_config=print_config,
        verify=verify,
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
    resume_if_there: Annotated[
        bool, typer.Option("--resume-if-there", help="Go on if --run-dir holds a pipeline, else begin: for batch jobs.")
    ] = False,
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Override a config value, e.g. pretrain.train.base_lr=1e-3."),
    ] = [],  # noqa: B006
    token_cache: Annotated[Place, typer.Option("--token-cache", help="Folder of token caches; default: cache.")] = None,
    device: DeviceOption = "auto",
    print_config: Annotated[bool, typer.Option("--print-config", help="Print both configs and stop.")] = False,
    verify: VerifyOption = False,
) -> None:
    """Pretrain on token caches, then fine-tune for chat: a best checkpoint for each."""
    from niels_gpt.cli.pipeline import run_pipeline

    run_pipeline(
        config=config,
        run_dir=run_dir,
        resume=resume,
        resume_if_there=resume_if_there,
        overrides=list(set_),
        token_cache=token_cache,
        device=device,
        print_config=print_config,
        verify=verify,
    )


@app.command("eval")
def eval_(
    run: RunOption = None,
    checkpoint: CheckpointOption = None,
    split: Annotated[
        str, typer.Option("--split", help="val, or test: of sources and caches that have a test split.")
    ] = "val",
    stride: Annotated[
        Count, typer.Option("--stride", min=1, help="Start a window every N bytes (default T): less is exacter.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32, or bf16: faster on a GPU.")] = "fp32",
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    source: SourceOption = [],  # noqa: B006
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
    from niels_gpt.cli.eval import run_eval

    run_eval(
        run=run,
        checkpoint=checkpoint,
        split=split,
        stride=stride,
        precision=precision,
        data={"wiki": wiki, "roam": roam, "primer": primer, "encoding_errors": encoding_errors},
        sources=source,
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
    weights: WeightsOption = "float32",
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Continue a text."""
    from niels_gpt.cli.chat import run_generate, sampling

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
        weights=weights,
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
    weights: WeightsOption = "float32",
    tokenizer: TokenizerOption = None,
) -> None:
    """Talk to a model: /system TEXT, /reset, /exit."""
    from niels_gpt.cli.chat import run_chat, sampling

    run_chat(
        run=run,
        checkpoint=checkpoint,
        system=system,
        max_tokens=max_tokens,
        sampling=sampling(temperature, top_k, top_p, min_p),
        seed=seed,
        device=device,
        weights=weights,
        tokenizer=tokenizer,
    )


app.command()(memorize)
app.command()(audit)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; see `run_app` for the exit codes."""
    run_app(app, arguments, name="niels-gpt")
