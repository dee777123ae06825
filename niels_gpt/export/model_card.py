"""README.md of an exported model: what it is, what it was trained on, how well it predicts, what it recites.

It is made to be published: it has no paths of data, and no text of the user.
"""

from __future__ import annotations

import json
import re
import shlex

from niels_gpt import __version__
from niels_gpt.config.public_model import PREFIX
from niels_gpt.export.audit_gate import Clearance
from niels_gpt.pretrained.find_model import is_repository
from niels_gpt.pretrained.public_base import PublicBase, public_base
from niels_gpt.report.document import Block, Document, Facts, Lead, Paragraph, Section, Text, markdown
from niels_gpt.report.run_report import NOT_RECORDED, RunFacts, data_blocks, read_facts, score_table
from niels_gpt.runs.catalog import stored_scores
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.history import history
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system.console import plural
from niels_gpt.tokenizer import ByteTokenizer

_PATH = re.compile(rf"(?<![^\s={{\[,'\"])(?P<prefix>{PREFIX})?(?P<path>[^={{}}\[\],'\":]*/[^={{}}\[\],'\":]*)")
"""A path in a word of a command line: all of the word, or what follows the = of an option or is in a mapping."""


def model_card(loaded: LoadedRun, clearance: Clearance, *, name: str, architecture: str, usage: str) -> str:
    """Return the Markdown of the card, with the YAML header of the Hugging Face Hub.

    usage: a short program that loads the exported model.
    """
    facts = read_facts(loaded.home.path) if loaded.home is not None else None
    base = public_base(loaded.home)
    sections = [
        Section("Model", _model(loaded, architecture, base)),
        Section("Use", [Text(usage)]),
        Section("Training data", _data(loaded.home) or [Paragraph(f"{NOT_RECORDED}.")]),
        Section("Metrics", _metrics(facts)),
        Section("What it recites", [Lead([clearance.sentence()])]),
        Section("Command", _commands(facts)),
    ]
    done = "trained" if base is None else "fine-tuned" if loaded.step else "imported and exported"
    subtitle = f"A small language model, {done} with niels-gpt {__version__}."
    header = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [niels-gpt]"]
    if base is not None and is_repository(base.name):
        header.append(f"base_model: {base.name}")
    if base is not None and base.licence and not loaded.step:  # a copy keeps its licence; others choose theirs
        header.append(f"license: {json.dumps(base.licence)}")
    return "\n".join(["---", *header, "---", ""]) + "\n" + markdown(Document(name, subtitle, sections))


def _model(loaded: LoadedRun, architecture: str, base: PublicBase | None) -> list[Block]:
    config, tokenizer = loaded.model.config, loaded.tokenizer
    unit = "byte" if isinstance(tokenizer, ByteTokenizer) else "token"
    rows = [
        ("Architecture", architecture),
        ("Parameters", f"{loaded.model.num_parameters():,}"),
        ("Layers, width, heads", f"{config.L}, {config.C}, {config.H} ({config.kv_heads} of keys and values)"),
        ("Context", f"{config.T:,} {unit}s"),
        ("Vocabulary", "256 bytes" if unit == "byte" else f"{tokenizer.vocab_size:,} tokens"),
        ("Training steps", f"{loaded.step:,}"),
    ]
    if base is not None:
        rows.append(("Base", f"{base.name}, licence: {base.licence or 'unknown'}"))
    return [Facts(rows)]


def _data(home: RunFolder | None) -> list[Block]:
    """Return the sources of a run and of the runs that it started from, the last one first."""
    blocks: list[Block] = []
    for past in history(home):
        if past.run.imported:
            blocks.append(Paragraph("What the base was trained on is not recorded."))
            break
        if blocks:
            blocks.append(Paragraph("Before that:"))
        blocks += data_blocks(read_facts(past.run.path), paths=False)
    return blocks


def _metrics(facts: RunFacts | None) -> list[Block]:
    """Return the losses that the run has recorded; nothing is computed."""
    if facts is None or facts.detail["best_loss"] is None:
        return [Paragraph("No evaluation is recorded.")]
    detail = facts.detail
    bits = "" if detail["bits_per_byte"] is None else f", {detail['bits_per_byte']:.3f} bits per byte"
    after = f"after {plural(detail['best_step'], 'step')}"
    blocks: list[Block] = [
        Paragraph(f"Best validation loss {detail['best_loss']:.4f} nats per {facts.unit} {after}{bits}.")
    ]
    scores = stored_scores(facts.path, detail["best_step"])
    return [*blocks, score_table(scores)] if scores else blocks


def _commands(facts: RunFacts | None) -> list[Block]:
    """Return what was typed to train the run, without the folders of paths."""
    sessions = facts.environment.sessions if facts and facts.environment else []
    typed = [
        "niels_gpt.train(), from Python" if session.command is None else _without_folders(session.command)
        for session in sessions
    ]
    if not typed:
        return [Paragraph(f"{NOT_RECORDED[:1].upper()}{NOT_RECORDED[1:]}.")]
    return [Text("\n".join(typed))]


def _without_folders(line: str) -> str:
    """Return a command line with the last part of each path; a repository of the Hub (hf:NAME/MODEL) is no path."""
    try:
        words = shlex.split(line)
    except ValueError:  # not quoted for a shell: as one word
        return _PATH.sub(_last_part, line)
    return shlex.join(_PATH.sub(_last_part, word) for word in words)


def _last_part(match: re.Match[str]) -> str:
    prefix, path = match["prefix"] or "", match["path"]
    return match[0] if prefix and is_repository(path) else prefix + path.rstrip("/").rsplit("/", 1)[-1]
