"""What `demo` and `notes` share: train a chat model of some notes, and show what it has learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from niels_gpt.config import RunConfig
    from niels_gpt.runs.loading import LoadedRun
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.workflow.chat_model import Corpus
    from niels_gpt.workflow.plan import Plan

EXAMPLES = 3
"""Questions of the examination that are shown with their answers."""


def describe_plan(plan: Plan) -> str:
    """Return the plan in one sentence."""
    from niels_gpt.system.console import format_duration, short_number

    C, L, _, T = plan.size
    reads = f"{plan.vocab_size:,} subwords" if plan.vocab_size else "bytes"
    text = f"{short_number(plan.parameters)} weights over {reads} ({L} layers, {C} wide, {T} tokens of context)"
    steps = f"{plan.pretrain_steps:,} steps on the notes"
    if plan.sft_steps:
        steps += f", then {plan.sft_steps:,} on dialogues"
    took = f", about {format_duration(plan.seconds)}" if plan.seconds else ""
    return f"{text}; {steps}{took}"


def build_and_train(
    corpus: Corpus, dialogues: Path, plan: Plan, folder: PipelineFolder, *, about_notes: bool, device: str
) -> dict[str, RunConfig]:
    """Build the caches in the folder of a pipeline, and train both phases; return their configs.

    Exits after a signal, with how to resume.
    """
    from niels_gpt.cli.pipeline import check_and_store, run_phases
    from niels_gpt.system.console import plural
    from niels_gpt.system.processes import open_world
    from niels_gpt.system.progress import status_line
    from niels_gpt.training.progress import say
    from niels_gpt.training.tasks.token_task import with_vocabulary
    from niels_gpt.workflow.chat_model import build_caches, phase_configs, write_dialogues

    check_free(folder)
    cache = folder.path / "cache"
    with status_line("writing the dialogues") as show:
        numbers = write_dialogues(corpus, dialogues, cache, about_notes=about_notes)
        show(f"training a tokenizer of {plan.vocab_size:,} subwords")
        tokenizer = build_caches(corpus, cache, numbers, vocab_size=plan.vocab_size)
    listed = ", ".join(plural(number, name.replace("_", " ").rstrip("s")) for name, number in numbers.items())
    say(f"{len(corpus.train):,} notes to train on, {len(corpus.held_out):,} held out; {listed}; "
        f"{tokenizer.vocab_size:,} tokens")  # fmt: skip
    configs = phase_configs(plan, corpus, cache, numbers)
    with open_world(device) as world:
        phases = {name: with_vocabulary(config) for name, config in configs.items()}
        check_and_store(phases, folder)
        run_phases(phases, folder, [], world, show_samples=True)
    return phases


def check_free(folder: PipelineFolder) -> None:
    """Raise ValueError if the folder already holds a run or a pipeline, before any work is done."""
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.system import files
    from niels_gpt.system.program import command

    files.check_output_path(folder.path, "--run-dir", folder=True)
    if folder.exists:
        resume = command("pipeline", folder.path, "--resume")
        raise ValueError(
            f"{folder.path} already holds a pipeline: resume it with {resume}, or choose another --run-dir"
        )
    if RunFolder(folder.path).exists:
        resume = RunFolder(folder.path).resume_command
        raise ValueError(f"{folder.path} already holds a run: resume it with {resume}, or choose another --run-dir")


def show_scores_of(loaded: LoadedRun, config: RunConfig) -> None:
    """Print the bits per byte on held-out text, beside general compressors."""
    from niels_gpt.cache.folder import CacheFolder
    from niels_gpt.cli.eval import show_scores
    from niels_gpt.training.score_run import score_token_caches

    show_scores(score_token_caches(loaded, config, CacheFolder(config.data.token_cache)), wiki=config.data.wiki)


def show_examination(loaded: LoadedRun, *, most: int | None = None) -> float:
    """Ask the embedded questions, print the share of answers on topic and a few answers; return the share."""
    from niels_gpt.inference.questions import ask, load_questions, share_on_topic
    from niels_gpt.system.progress import progress_bar

    questions = load_questions()
    questions = questions if most is None else questions[:: max(len(questions) // most, 1)][:most]
    answers = []
    with progress_bar("asking", "questions") as show:
        for answer in ask(loaded.model, questions, tokenizer=loaded.tokenizer):
            answers.append(answer)
            show(len(answers), len(questions))
    share = share_on_topic(answers)
    number = sum(answer.on_topic for answer in answers)
    print(f"answers on topic: {number} of {len(answers)} ({share:.0%}) to questions in words that it has never seen")
    for answer in answers[:: max(len(answers) // EXAMPLES, 1)][:EXAMPLES]:
        print(f"you>   {answer.question.text}\nniels> {answer.reply}{'' if answer.on_topic else '   (off topic)'}")
    return share
