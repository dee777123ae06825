"""`niels-gpt generate`: continue a text. Also the options that `generate` and `chat` turn into objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from niels_gpt.cli.options import (
    CheckpointOption,
    DeviceOption,
    JsonOption,
    MaxTokensOption,
    MinPOption,
    Number,
    RepetitionPenaltyOption,
    SeedOption,
    TemperatureOption,
    TokenizerOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    complete_runs,
    run_or_newest,
)
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.inference.sampling import Sampling
    from niels_gpt.model.gpt import GPT


def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] TEXT",
            autocompletion=complete_runs,
            help="The text to continue (- reads it from standard input), after the run to use; default: the newest.",
        ),
    ],
    checkpoint: CheckpointOption = None,
    max_tokens: MaxTokensOption = 200,
    temperature: TemperatureOption = 0.9,
    top_k: TopKOption = 50,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
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
    run, prompt = split_words(words, checkpoint)

    from json import dumps

    from niels_gpt.inference.generation import generate_batch, stream_text
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.rng import seeded_or_random

    sampling = make_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    text = read_stdin() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue")
    loaded = load_run(run_or_newest(run, checkpoint), checkpoint, device, tokenizer)
    model = with_weights(loaded.model, weights)
    generator = seeded_or_random(seed)
    if number == 1 and not json:
        chunks = stream_text(
            model,
            text,
            max_new_tokens=max_tokens,
            sampling=sampling,
            generator=generator,
            stop=stop,
            use_cache=cache,
            tokenizer=loaded.tokenizer,
        )
        print(text + next(chunks, ""), end="", flush=True)  # the first chunk may raise: print nothing before it
        for chunk in chunks:
            print(chunk, end="", flush=True)
        print()
        return
    texts = generate_batch(
        model,
        [text] * number,
        max_new_tokens=max_tokens,
        sampling=sampling,
        generator=generator,
        stop=stop,
        use_cache=cache,
        tokenizer=loaded.tokenizer,
    )
    if json:
        print(dumps({"checkpoint": str(loaded.path), "prompt": text, "texts": texts}, ensure_ascii=False))
        return
    for i, continued in enumerate(texts):
        print(f"--- {i + 1} of {number}\n{continued}")


def split_words(words: list[str], checkpoint: Path | None = None) -> tuple[Path | None, str]:
    """Return (run or None, text) of `[RUN] TEXT`. Raises ValueError if it is not clear which is which."""
    from niels_gpt.runs.loading import names_run

    first, rest = words[0], words[1:]
    if rest and not names_run(first):
        raise ValueError(
            f"{first!r} is not a run, a pipeline or a checkpoint. Name a run folder (it has a config.yaml); or quote a "
            f"text of several words: {command('generate', ' '.join(words))}"
        )
    if len(rest) > 1:
        raise ValueError(f"quote a text of several words: {command('generate', first, ' '.join(rest))}")
    if not rest and checkpoint is None and names_run(first):
        raise ValueError(f"{first} is a run, and there is no text to continue: {command('generate', first, 'TEXT')}")
    return (Path(first), rest[0]) if rest else (None, first)


def make_sampling(temperature: float, top_k: int, top_p: Number, min_p: Number, repetition_penalty: float) -> Sampling:
    """Return the Sampling of the options; --top-k 0 means no limit. Raises ValueError for a value out of range."""
    from niels_gpt.inference.sampling import Sampling

    return Sampling(temperature, top_k if top_k != 0 else None, top_p, min_p, repetition_penalty)


def with_weights(model: GPT, weights: str) -> GPT:
    """Return the model with its weights as `--weights` says."""
    from niels_gpt.inference.int8 import Int8GPT

    return Int8GPT.of(model) if weights == "int8" else model


def open_stdin() -> TextIO:
    """Return standard input, with bytes that are not utf-8 as lone surrogates. Raises ValueError if it is closed."""
    import io
    import sys

    if sys.stdin is None:
        raise ValueError("standard input is closed: type something, or redirect a file (< FILE)")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def read_stdin() -> str:
    """Return all of standard input. Raises ValueError if it is not utf-8."""
    text = open_stdin().read()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        offset = len(text[: err.start].encode("utf-8", "surrogateescape"))
        raise ValueError(f"standard input is not utf-8 text (byte {offset})") from None
    return text
