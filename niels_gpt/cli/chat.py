"""`niels-gpt chat`: a conversation with a model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import (
    CheckpointOption,
    DeviceOption,
    MaxTokensOption,
    MinPOption,
    RepetitionPenaltyOption,
    RunArgument,
    SeedOption,
    TemperatureOption,
    Text,
    TokenizerOption,
    TopKOption,
    TopPOption,
    WeightsOption,
)

if TYPE_CHECKING:
    from niels_gpt.inference.conversation import Conversation
    from niels_gpt.runs.loading import LoadedRun

HELP = "/system TEXT sets the system message, /reset starts over, /exit ends the chat, /help explains more"
LONG_HELP = """\
/system TEXT   set the system message; without TEXT there is none
/reset         forget the conversation so far; the system message stays
/help          show this
/exit          end the chat; Ctrl-D, or Ctrl-C at the prompt, does too
Ctrl-C while the model writes stops the reply and keeps the chat. What does not begin with / goes to the model."""


def chat(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    system: Annotated[Text, typer.Option("--system", help="System message at the start.")] = None,
    max_tokens: MaxTokensOption = 200,
    temperature: TemperatureOption = 0.3,
    top_k: TopKOption = 50,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    weights: WeightsOption = "float32",
    tokenizer: TokenizerOption = None,
) -> None:
    """Chat with a model: /system TEXT, /reset, /help, /exit."""
    from niels_gpt.cli.generate_text import make_sampling, open_stdin, with_weights
    from niels_gpt.inference.conversation import Conversation
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.rng import seeded_or_random

    sampling = make_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    interactive = open_stdin().isatty()
    loaded = load_run(run, checkpoint, device, tokenizer)
    conversation = Conversation(
        with_weights(loaded.model, weights),
        system=system,
        sampling=sampling,
        generator=seeded_or_random(seed),
        max_new_tokens=max_tokens,
        tokenizer=loaded.tokenizer,
        context_overflow="half",  # a reply must stay fast
    )
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys and history for input())
        print(f"{loaded.path} after {loaded.step} steps. {HELP}.")
    while True:
        try:
            line = input("you> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            break
        if line == "/exit":
            break
        if line.startswith("/"):
            _run_command(conversation, line)
        elif line:
            _print_reply(conversation, line, speaker(loaded))


def speaker(loaded: LoadedRun) -> str:
    """Return who replies: niels, as our dialogues call the model; for a public model, also tuned, its run."""
    from niels_gpt.tokenizer import ForeignTokenizer

    return loaded.name if isinstance(loaded.tokenizer, ForeignTokenizer) else "niels"


def _run_command(conversation: Conversation, line: str) -> None:
    """Run a line that starts with a slash, and print what it did."""
    name, _, argument = line.partition(" ")
    if name == "/reset":
        conversation.reset()
        print("(conversation cleared)")
    elif name == "/system":
        try:
            conversation.set_system(argument.strip() or None)
            print(f"(system: {conversation.system})" if conversation.system else "(no system message)")
        except ValueError as err:
            print(f"(refused: {err})")
    elif name in ("/help", "/?"):
        print(LONG_HELP)
    else:
        print(f"(unknown command {name}: {HELP})")


def _print_reply(conversation: Conversation, line: str, speaker: str) -> None:
    """Print the reply while it is generated; Ctrl-C ends the reply, not the conversation."""
    print(f"{speaker}> ", end="", flush=True)
    try:
        for chunk in conversation.reply(line):
            print(chunk, end="", flush=True)
        print()
    except ValueError as err:
        print(f"(refused: {err})")
    except KeyboardInterrupt:
        print(" (interrupted)")
