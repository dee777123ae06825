"""What `demo` and `notes` share: train a chat model of some notes, and show what it has learned."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from niels_gpt.config import RunConfig
    from niels_gpt.inference.questions import Answer
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.loading import LoadedRun
    from niels_gpt.runs.pipeline import PipelineFolder
    from niels_gpt.training.score_run import Scores
    from niels_gpt.workflow.chat_model import Corpus
    from niels_gpt.workflow.note_topics import NoteTopic
    from niels_gpt.workflow.plan import Plan

EXAMPLES = 3
"""Questions that are shown with answers on topic; one more is shown with an answer off topic."""


class TrainedModel(NamedTuple):
    """The runs of a trained model: one that continues notes, and one that chats; the same for bytes."""

    writer: LoadedRun
    writer_config: RunConfig
    chat: LoadedRun


def build_and_train(
    corpus: Corpus,
    dialogues: Path | None,
    topics: Sequence[NoteTopic],
    plan: Plan,
    folder: PipelineFolder,
    *,
    device: str,
    resume_command: str | None = None,
    base: LoadedRun | None = None,
) -> TrainedModel:
    """Build the caches in the folder of a pipeline, and train both phases; over bytes, one run.

    dialogues: a file; None: those of the package that the plan asks for. topics: what the model learns to answer about
    the notes. resume_command: what to type after a signal, which is printed before the exit; default: the command of
    the pipeline or run. base: the model that the plan fine-tunes.
    """
    from niels_gpt.data.note_groups import shared_lines_text
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.runs.pipeline import CACHE
    from niels_gpt.system.console import plural
    from niels_gpt.system.progress import status_line
    from niels_gpt.training.progress import say
    from niels_gpt.workflow.chat_model import prepare

    with status_line("writing the dialogues") as show:
        configs, numbers = prepare(corpus, dialogues, topics, plan, folder.path / CACHE, base=base, show=show)
    listed = " and ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in numbers.items())
    say(f"{plural(len(corpus.train), 'note')} to train on, {len(corpus.held_out):,} held out; dialogues: {listed}")
    say(shared_lines_text(corpus.lines_in_training, corpus.lines_in_training_by_file))
    if "bytes" in configs:
        return _train_one(configs["bytes"], RunFolder(folder.path), device, resume_command, resume=False)
    return _train_both(configs, folder, device, resume_command, resume=False)


def resume_training(
    folder: PipelineFolder, *, device: str, resume_command: str, allow_data_change: bool = False
) -> TrainedModel:
    """Continue the training in a folder that has a plan (`plan_in`); a finished one is only loaded.

    allow_data_change: although notes were removed, which is recorded; see `check_notes`.
    """
    from niels_gpt.runs.folder import RunFolder

    if folder.exists:
        return _train_both(folder.read_configs(), folder, device, resume_command, resume=True)
    run = RunFolder(folder.path)
    config = run.read_config()
    return _train_one(config, run, device, resume_command, resume=True, allow_data_change=allow_data_change)


def _train_one(
    config: RunConfig,
    run: RunFolder,
    device: str,
    command: str | None,
    *,
    resume: bool,
    allow_data_change: bool = False,
) -> TrainedModel:
    """Train a model over bytes."""
    from niels_gpt.cli.train import exit_if_stopped, train_and_report
    from niels_gpt.runs.loading import load_run

    path, saved, _ = run.newest_checkpoint("cpu", tensors=False)
    if path is None or saved["step"] < config.train.total_steps or not run.has_outputs_of(saved["step"]):
        result = train_and_report(
            config, run, device=device, show_samples=True, resume=resume, allow_data_change=allow_data_change
        )
        exit_if_stopped(result.stopped_by, result, run, command=command)
    loaded = load_run(run.path, None, device)
    return TrainedModel(loaded, config, loaded)


def _train_both(
    phases: dict[str, RunConfig], folder: PipelineFolder, device: str, command: str | None, *, resume: bool
) -> TrainedModel:
    """Train both phases of a model over subwords."""
    from niels_gpt.cli.pipeline import check_and_store, run_phases
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.processes import open_world
    from niels_gpt.training.tasks.token_task import with_vocabulary

    with open_world(device) as world:
        phases = {name: with_vocabulary(phase) for name, phase in phases.items()}
        finished = check_and_store(phases, folder, resume)
        run_phases(phases, folder, finished, world, show_samples=True, command=command)
    writer, chat = (load_run(folder.runs[name].path, None, device) for name in ("pretrain", "sft"))
    return TrainedModel(writer, phases["pretrain"], chat)


def check_free(folder: PipelineFolder, *, resume: str = "") -> None:
    """Raise ValueError if the folder already holds a model, or under torchrun, before any work is done.

    resume: what to type to continue that model; default: the command of the pipeline or run.
    """
    from niels_gpt.runs.folder import RunFolder
    from niels_gpt.system import files
    from niels_gpt.system.processes import SINGLE_PROCESS, check_single_process
    from niels_gpt.system.program import command

    check_single_process(SINGLE_PROCESS)
    files.check_output_path(folder.path, "--run-dir", folder=True)
    run = RunFolder(folder.path)
    if folder.exists or any(phase.exists for phase in folder.runs.values()):
        resume = resume or command("pipeline", folder.path, "--resume")
    elif run.exists:
        resume = resume or run.resume_command
    else:
        return
    raise ValueError(f"{folder.path} already holds a model: choose another --run-dir, or continue it: {resume}")


def show_scores_of(trained: TrainedModel, *, limit: int | None = None, primed: int | None = None) -> Scores:
    """Print the bits per byte on held-out text, beside general compressors, and return them.

    limit: score only so many tokens of each held-out set. primed: bytes of training text that compressors read first.
    """
    from niels_gpt.cli.eval import score_result, show_scores
    from niels_gpt.evaluation.baselines import PRIMED_BYTES
    from niels_gpt.runs.info import store_scores
    from niels_gpt.system.progress import status_line
    from niels_gpt.training.score_run import ScoreOptions, score_held_out

    config, writer = trained.writer_config, trained.writer
    with status_line("scoring the held-out notes"):
        scores = score_held_out(writer, config, ScoreOptions(limit=limit, primed=primed or PRIMED_BYTES))
    show_scores(scores, wiki=config.data.wiki)
    if writer.run is not None:  # for `runs list`
        store_scores(writer.run.path, score_result(writer, scores))
    return scores


def show_base_comparison(trained: TrainedModel, scores: Scores, *, most: int) -> None:
    """Print what the fine-tuning gained on held-out notes, and what it cost elsewhere; nothing without a base.

    scores: what `show_scores_of` returns. most: tokens of each text.
    """
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.memorization.base_model import load_base
    from niels_gpt.system.progress import status_line
    from niels_gpt.workflow.base_comparison import compare_with_base

    if trained.writer_config.init_from == "":
        return
    with status_line("comparing with the base"):
        base, problem = load_base(trained.writer)
        if problem:
            print(f"\nNot compared with the base: {problem}")
        if base is None:
            return
        lines = compare_with_base(base.model, trained.writer, trained.chat, trained.writer_config, scores, most=most)
    print("\nBits per byte before and after: of the base, after the notes, and after the dialogues (the chat model).")
    table = Table(box=None, pad_edge=False)
    table.add_column("text")
    for name in ("tokens", "base", "after notes", "after dialogues"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(line.text, f"{line.tokens:,}", *(f"{bits:.3f}" for bits in (line.base, line.writer, line.chat)))
    show_table(table, width=120)


def warn_of_secrets(corpus: Corpus) -> None:
    """Print a warning if the notes hold keys, passwords or personal numbers; the secrets themselves are not printed."""
    from niels_gpt.data.note_check import find_secrets
    from niels_gpt.system.console import plural
    from niels_gpt.system.program import command
    from niels_gpt.system.progress import status_line
    from niels_gpt.training.progress import say

    with status_line("looking for secrets"):
        found = sum(len(find_secrets(text)) for _, text in corpus.texts(corpus.selected.paths))
    if found:
        check = command("notes", "check", corpus.selected.root)
        say(f"warning: the notes hold {plural(found, 'secret')} (keys, passwords, card, phone or account numbers) that "
            f"a model can learn by heart: {check} lists them")  # fmt: skip


def warn_of_dominant_note(corpus: Corpus) -> None:
    """Print a warning if one note is most of the text."""
    from niels_gpt.data.note_check import dominant_note
    from niels_gpt.training.progress import say

    sizes = [Path(path).stat().st_size for path in corpus.selected.paths]
    if warning := dominant_note(corpus.selected.names(), sizes):
        say(f"warning: {warning}")


def warn_of_private_notes(corpus: Corpus) -> None:
    """Print which notes are read although their front matter says that they are private."""
    from niels_gpt.config import NotesConfig
    from niels_gpt.data.note_selection import is_private, private_notes_line, read_note
    from niels_gpt.training.progress import say

    texts = (read_note(path, NotesConfig(), corpus.errors) for path in corpus.selected.paths)
    names = [name for name, text in zip(corpus.selected.names(), texts, strict=True) if is_private(text) is not None]
    if names:
        say(f"warning: {private_notes_line(names)}")


def opening(corpus: Corpus) -> str:
    """Return how a note begins: its first heading, else the start of a line, from a note that was trained on.

    It is printed, so a line with a secret is passed over.
    """
    from niels_gpt.data.note_check import find_secrets

    begin = "# "
    for _, text in itertools.islice(corpus.texts(corpus.train), 100):
        for line in text.splitlines()[:20]:
            letters = sum(character.isalpha() for character in line)
            if letters < 5 or ":" in line or find_secrets(line):
                continue
            if line.startswith("# ") and len(line) <= 40:
                return line.strip()
            begin = begin if begin != "# " else " ".join(line.split()[:3])[:40]
    return begin


def show_continuation(trained: TrainedModel, corpus: Corpus) -> None:
    """Print how the model continues the beginning of a note."""
    from niels_gpt.inference.generation import generate
    from niels_gpt.system.rng import generator

    begin = opening(corpus)
    text = generate(
        trained.writer.model,
        begin,
        max_new_tokens=80 if trained.writer_config.task != "bytes" else 240,
        temperature=0.7,
        generator=generator(0, "demo"),
        tokenizer=trained.writer.tokenizer,
    )
    print(f"\nA text that begins like one of your notes ({begin!r}):\n{text}")


def show_answers(trained: TrainedModel, topics: Sequence[NoteTopic], *, notes: int, most: int) -> None:
    """Ask `most` questions about topics that were taught, and print how many answers are right, and two of them.

    notes: how many the topics were chosen from. Each topic is asked about by its heading, in a form that was trained on
    for other topics ("remind me of my note on ..."), and with words of the note that are not in its heading.
    """
    from niels_gpt.cli.eval import ask_all
    from niels_gpt.inference.questions import Question, share_on_topic
    from niels_gpt.runs.pipeline import CACHE, TOPICS
    from niels_gpt.system.console import plural
    from niels_gpt.workflow.note_questions import new_question, question_in_other_words

    def some(items: Sequence[Any]) -> Sequence[Any]:
        return items[:: max(2 * len(items) // most, 1)][: max(most // 2, 1)]

    pairs = [(topic, question) for topic in topics if (question := question_in_other_words(topic)) is not None]
    asked = {
        "by heading": [(topic, new_question(topic)) for topic in some(topics)],
        "in other words": some(pairs),
    }
    questions = [Question(topic.name, question, (topic.begin,)) for kind in asked.values() for topic, question in kind]
    if not questions:
        return
    first, second = ([results[: len(asked["by heading"])], results[len(asked["by heading"]) :]]
                     for results in ask_all(trained.chat, questions))  # fmt: skip
    counts = ", ".join(
        f"{sum(answer.on_topic for answer in answers)} of {len(answers)} {kind}"
        for kind, answers in zip(asked, first, strict=True)
    )
    both, after_another = (mean(share_on_topic(kind) for kind in kinds if kind) for kinds in (first, second))
    print(f"\nQuestions about your notes, not asked like this in training, answered with the text of the note: "
          f"{counts}; {both:.0%} with equal weight, {after_another:.0%} if another question was asked before (in a "
          "chat, /reset forgets what was asked)")  # fmt: skip
    print(f"It was taught {plural(len(topics), 'topic')} of {plural(notes, 'note')}, which {CACHE}/{TOPICS} in "
          "its folder lists. It does not know other topics.")  # fmt: skip
    for kind in filter(None, first):
        _print_answer(trained.chat, next((answer for answer in kind if answer.on_topic), kind[0]))


def _print_answer(loaded: LoadedRun, answer: Answer, mark: str = "") -> None:
    """Print a question and its answer, aligned."""
    from niels_gpt.cli.chat import speaker

    name = f"{speaker(loaded)}>"
    print(f"{'you>':{len(name)}} {answer.question.text}\n{name} {answer.reply}{mark}")


QUICK_AUDIT = 25
"""Notes, and conversations about them, of the quick audit."""


def show_quick_audit(trained: TrainedModel, corpus: Corpus, *, windows: int) -> None:
    """Print what the chat model knows by heart of some of the notes, in about so many windows."""
    from niels_gpt.memorization.audit import AuditRequest, audit_notes
    from niels_gpt.memorization.measure import ExtractionSettings
    from niels_gpt.report.numbers import passage_probability
    from niels_gpt.system.console import plural
    from niels_gpt.system.progress import progress_bar

    model = trained.chat.model
    settings = ExtractionSettings.fitting(model.config.T, stride=25, greedy=0)
    request = AuditRequest(
        settings,
        corpus.selected.root,
        passages=3,
        encoding_errors="skip",
        exact=False,
        adapt_stride=True,
        sample=QUICK_AUDIT,
        most_windows=windows,
    )
    verdict = audit_notes(trained.chat, request, progress=progress_bar).verdict
    if verdict.interrupted:
        raise KeyboardInterrupt
    print(f"\nWhat it knows by heart (a quick audit of {plural(verdict.notes_audited, 'text')}):")
    if verdict.windows_over:
        print(f"{plural(verdict.windows_over, 'passage')} of {plural(verdict.notes_exposed, 'text')} can be recited: "
              "do not publish this model; for example, with the probability of each")  # fmt: skip
        for passage in verdict.passages:
            print(f"  {passage_probability(passage)}  {passage['document']}")
    else:
        print("no passage that it can recite was found; the complete audit decides")


def unreadable_lines(corpus: Corpus) -> list[str]:
    """Return a line about the files that are not utf-8 and were skipped, with their names."""
    from niels_gpt.data.reading.utf8 import NOT_UTF8
    from niels_gpt.system.console import first_few

    names = [entry.path for entry in corpus.selected.skipped if entry.kind == NOT_UTF8]
    if not names:
        return []
    listed = first_few(names, 10)
    return [f"skipped, because they are not utf-8: {listed} (--encoding-errors replace reads them)"]


def show_examination(loaded: LoadedRun, *, most: int | None = None) -> float:
    """Ask the embedded questions, print the share of answers on topic and a few answers; return the share."""
    from niels_gpt.cli.eval import ask_all
    from niels_gpt.inference.questions import load_questions, share_on_topic

    questions = load_questions()
    questions = questions if most is None else questions[:: max(len(questions) // most, 1)][:most]
    answers, second = ask_all(loaded, questions)
    share = share_on_topic(answers)
    number = sum(answer.on_topic for answer in answers)
    print(f"answers on topic: {number} of {len(answers)} ({share:.0%}) to questions in words that it has never seen; "
          f"{share_on_topic(second):.0%} if another question was asked before")  # fmt: skip
    right = [answer for answer in answers if answer.on_topic]
    wrong = [answer for answer in answers if not answer.on_topic]
    for answer in right[:: max(len(right) // EXAMPLES, 1)][:EXAMPLES]:
        _print_answer(loaded, answer)
    for answer in wrong[len(wrong) // 2 :][:1]:
        _print_answer(loaded, answer, "   (off topic)")
    return share
