"""`niels-gpt eval`: exact scores of a model on everything held out, beside what general compressors reach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from niels_gpt.cli.options import (
    CacheDirOption,
    CheckpointOption,
    Count,
    DeviceOption,
    EncodingOption,
    JsonOption,
    OfflineOption,
    OptionalPath,
    PrimerOption,
    RoamOption,
    RunArgument,
    SourceOption,
    TokenizerOption,
    WikiOption,
    choice_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from niels_gpt.inference.questions import Answer, Question
    from niels_gpt.runs.loading import LoadedRun
    from niels_gpt.training.score_run import Scores


def eval_(
    run: RunArgument = None,
    checkpoint: CheckpointOption = None,
    split: Annotated[
        str, choice_option("--split", ("val", "test"), "val, or test for sources and caches that have one.")
    ] = "val",
    stride: Annotated[
        Count,
        typer.Option(
            "--stride",
            min=1,
            help="Start a window every N bytes or tokens; default: T. Smaller is slower, more accurate.",
        ),
    ] = None,
    precision: Annotated[
        str, choice_option("--precision", ("fp32", "bf16"), "fp32, or bf16: faster on a GPU.")
    ] = "fp32",
    wiki: WikiOption = None,
    roam: RoamOption = None,
    primer: PrimerOption = None,
    source: SourceOption = [],  # noqa: B006
    encoding_errors: EncodingOption = None,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    cache_dir: CacheDirOption = None,
    limit: Annotated[
        Count, typer.Option("--limit", min=2, help="Score only the first N bytes or tokens of each held-out set.")
    ] = None,
    questions: Annotated[
        bool,
        typer.Option("--questions", help="Instead ask questions, and print the share of answers on topic."),
    ] = False,
    question_file: Annotated[
        OptionalPath,
        typer.Option("--question-file", help="Your questions (.jsonl: topic, question, words), for --questions."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Score a model on all held-out data, in bits per byte.

    The table also shows what xz, zstd and byte frequencies reach on the same bytes: primed, they have read the training
    text first, as the model has; alone, they have not. With --questions a chat model
    answers questions that no dialogue of the package contains; an answer on topic has one of the words of its question.
    """
    from json import dumps

    from niels_gpt.cache.folder import CacheFolder
    from niels_gpt.config import RunConfig
    from niels_gpt.config.yaml_file import with_data
    from niels_gpt.runs.info import store_scores
    from niels_gpt.runs.loading import load_run
    from niels_gpt.runs.pipeline import pipeline_of
    from niels_gpt.system.program import command
    from niels_gpt.tokenizer import ByteTokenizer
    from niels_gpt.training.score_run import ScoreOptions, score_byte_streams, score_token_caches

    loaded = load_run(run, checkpoint, device, tokenizer)
    if questions or question_file is not None:
        _ask_questions(loaded, question_file, as_json=json)
        return
    config = loaded.home.read_config() if loaded.home else RunConfig()
    options = ScoreOptions(split, stride, limit, precision)
    if not isinstance(loaded.tokenizer, ByteTokenizer):
        if cache_dir is None and loaded.home is not None:
            tokenizer = loaded.home.path / "tokenizer"
            notes = ("--only", "roam", "--notes", "NOTES")
            build = command("cache", "build-all", *notes, "--tokenizer", tokenizer, "--cache-dir", "CACHE")
            loaded.home.check_data(f"name caches of its tokenizer with --cache-dir ({build} builds some)")
        scores = score_token_caches(loaded, config, CacheFolder(cache_dir or config.data.token_cache), options)
    else:
        data = {"wiki": wiki, "roam": roam, "primer": primer, "encoding_errors": encoding_errors}
        built_in = any((wiki, roam, primer))
        config = with_data(config, data, source)
        scores = score_byte_streams(loaded, config, options, built_in=built_in)
    result = score_result(loaded, scores, stride=stride, precision=precision)
    if loaded.run is not None and checkpoint is None and split == "val" and limit is None:
        store_scores(loaded.run.path, result)
    if json:
        print(dumps(result, indent=2))
        return
    print(f"{loaded.path} after {loaded.step} steps; bits per byte, lower is better")
    show_scores(scores, wiki=config.data.wiki)
    home = loaded.home.path if config.task == "sft" and loaded.home is not None else None
    if home is not None and (pipeline := pipeline_of(home)) is not None:
        writer = command("eval", pipeline / "pretrain")
        print(f"This is the model that chats; fine-tuning forgets other text. The one before it: {writer}")


def score_result(
    loaded: LoadedRun, scores: Scores, *, stride: int | None = None, precision: str = "fp32"
) -> dict[str, Any]:
    """Return scores with the checkpoint and the settings they were measured with, for JSON and for `store_scores`."""
    measured = {"checkpoint": str(loaded.path), "step": loaded.step, "stride": stride or loaded.model.config.T}
    return {**measured, "precision": precision, "scores": scores}


def ask_all(loaded: LoadedRun, questions: Sequence[Question]) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of a model to questions, with a progress display: in new chats, and as second questions."""
    from niels_gpt.inference.questions import as_second_questions, ask
    from niels_gpt.system.progress import progress_bar

    answers, second = [], []
    with progress_bar("asking", "questions") as show:
        for answer in ask(loaded.model, questions, tokenizer=loaded.tokenizer):
            answers.append(answer)
            show(len(answers), 2 * len(questions))
        again, earlier = as_second_questions(answers)
        for answer in ask(loaded.model, again, earlier=earlier, tokenizer=loaded.tokenizer):
            second.append(answer)
            show(len(answers) + len(second), 2 * len(questions))
    return answers, second


def _ask_questions(loaded: LoadedRun, file: Path | None, *, as_json: bool) -> None:
    """Print the answers to questions, those off topic first, and the share on topic."""
    from json import dumps

    from niels_gpt.inference.questions import load_questions, share_on_topic

    answers, second = ask_all(loaded, load_questions(file))
    share, share_second = share_on_topic(answers), share_on_topic(second)
    if as_json:
        rows = [
            {**a.question._asdict(), "reply": a.reply, "on_topic": a.on_topic, "second_reply": b.reply}
            | {"second_on_topic": b.on_topic}
            for a, b in zip(answers, second, strict=True)
        ]
        result = {"checkpoint": str(loaded.path), "step": loaded.step, "on_topic": share}
        result |= {"second_on_topic": share_second, "answers": rows}
        print(dumps(result, indent=2, ensure_ascii=False))
        return
    for answer in sorted(answers, key=lambda answer: answer.on_topic):
        mark = "on topic " if answer.on_topic else "off topic"
        print(f"{mark}  {answer.question.topic}: {answer.question.text}\n           {answer.reply}")
    number = sum(answer.on_topic for answer in answers)
    print(f"{loaded.path} after {loaded.step} steps")
    print(f"answers on topic: {number} of {len(answers)} ({share:.1%}); {share_second:.1%} after another question")


def show_scores(scores: Scores, *, wiki: str) -> None:
    """Print a table: one row per held-out set, the model's bits per byte beside the references.

    `wiki` is data.wiki of the config: the table says if val_wiki is Python docstrings.
    """
    from rich.table import Table

    from niels_gpt.cli.tables import show_table
    from niels_gpt.data.source_paths import display_name
    from niels_gpt.evaluation.baselines import PRIMED, reference_bits, reference_notes

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("held out")
    bytes_only = all(score["bytes"] == score["tokens"] for score in scores.values())
    sizes = ["bytes"] if bytes_only else ["bytes", "tokens"]
    unit = "byte" if bytes_only else "token"
    compared = {name: reference_bits(score) for name, score in scores.items()}
    titles = list(dict.fromkeys(title for bits in compared.values() for title in bits))
    for name in (*sizes, f"nats/{unit}", "ppl", "model", *titles):
        table.add_column(name, justify="right", style="bold" if name == "model" else None)
    for name, score in scores.items():
        bits = [score["bits_per_byte"], *(compared[name].get(title) for title in titles)]
        table.add_row(
            display_name(name, wiki),
            *(f"{score[key]:,}" for key in sizes),
            f"{score['nats_per_token']:.3f}",
            f"{score['perplexity']:.2f}",
            *("" if b is None else f"{b:.3f}" for b in bits),
        )
    show_table(table, width=120)
    if any(score.get("baselines") for score in scores.values()):
        print(PRIMED)
    for name, score in scores.items():
        for note in reference_notes(display_name(name, wiki), score):
            print(note)
