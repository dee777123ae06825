"""`niels-gpt generate` and `niels-gpt chat`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TextIO

import torch

from niels_gpt.inference.conversation import Conversation
from niels_gpt.inference.generation import generate_batch, stream_text
from niels_gpt.inference.int8 import Int8GPT
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.loading import load_run

HELP = "/system TEXT sets the system message, /reset forgets the conversation, /exit leaves"


def sampling(temperature: float, top_k: int, top_p: float | None, min_p: float | None) -> Sampling:
    """The options as a Sampling; --top-k 0 is no limit."""
    return Sampling(temperature, top_k if top_k != 0 else None, top_p, min_p)


def run_generate(
    *,
    prompt: str,
    run: Path | None,
    checkpoint: Path | None,
    max_tokens: int,
    sampling: Sampling,
    stop: list[str],
    number: int,
    seed: int | None,
    cache: bool,
    device: str,
    weights: str,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    text = _piped_in() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue")
    loaded = load_run(run, checkpoint, device, tokenizer)
    model = _with_weights(loaded.model, weights)
    generator = _generator(seed)
    if number == 1 and not as_json:
        pieces = stream_text(
            model,
            text,
            max_new_tokens=max_tokens,
            sampling=sampling,
            generator=generator,
            stop=stop,
            use_cache=cache,
            tokenizer=loaded.tokenizer,
        )
        print(text + next(pieces, ""), end="", flush=True)  # what cannot be continued is not begun
        for piece in pieces:
            print(piece, end="", flush=True)
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
    if as_json:
        print(json.dumps({"checkpoint": str(loaded.path), "prompt": text, "texts": texts}, ensure_ascii=False))
        return
    for i, result in enumerate(texts):
        print(f"--- {i + 1} of {number}\n{result}")


def run_chat(
    *,
    run: Path | None,
    checkpoint: Path | None,
    system: str | None,
    max_tokens: int,
    sampling: Sampling,
    seed: int | None,
    device: str,
    weights: str,
    tokenizer: Path | None,
) -> None:
    interactive = _standard_input().isatty()
    loaded = load_run(run, checkpoint, device, tokenizer)
    talk = Conversation(
        _with_weights(loaded.model, weights),
        system=system,
        sampling=sampling,
        generator=_generator(seed),
        max_new_tokens=max_tokens,
        tokenizer=loaded.tokenizer,
    )
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys and history for input())
        print(f"{loaded.path} after {loaded.step} updates. {HELP}.")
    while True:
        try:
            line = input("you> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            break
        if not line:
            continue
        if line.startswith("/"):
            if line == "/exit":
                break
            _command(talk, line)
            continue
        _reply(talk, line)


def _command(talk: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        talk.reset()
        print("(forgotten)")
    elif name == "/system":
        try:
            talk.set_system(rest.strip() or None)
            print(f"(system: {talk.system})" if talk.system else "(no system message)")
        except ValueError as err:
            print(f"(refused: {err})")
    else:
        print(f"(unknown command {name}: {HELP})")


def _reply(talk: Conversation, line: str) -> None:
    """Print the reply as it comes; Ctrl-C ends this reply, not the conversation."""
    print("niels> ", end="", flush=True)
    try:
        for piece in talk.reply(line):
            print(piece, end="", flush=True)
        print()
    except ValueError as err:
        print(f"(refused: {err})")
    except KeyboardInterrupt:
        print(" (interrupted)")


def _with_weights(model: GPT, weights: str) -> GPT:
    """The model as `--weights` asks for it. Raises ValueError for an unknown kind, or int8 not on a CPU."""
    if weights not in ("float32", "int8"):
        raise ValueError(f"--weights must be float32 or int8, got {weights!r}")
    return Int8GPT.of(model) if weights == "int8" else model


def _standard_input() -> TextIO:
    """What is typed or piped in; bytes that are not utf-8 are lone surrogates. Raises ValueError where it is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: type something, or give a file (< FILE)")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def _piped_in() -> str:
    """All of the standard input. Raises ValueError where it is not utf-8."""
    text = _standard_input().read()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        place = len(text[: err.start].encode("utf-8", "surrogateescape"))
        raise ValueError(f"standard input is not utf-8 text (byte {place})") from None
    return text


def _generator(seed: int | None) -> torch.Generator:
    """Seeded as asked, else by the system."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
