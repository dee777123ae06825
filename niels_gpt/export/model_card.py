"""README.md of an exported model: what it is, what it was trained on, how well it predicts, what it recites.

It is made to be published: it has no paths, no commands, which name folders and patterns, and no text of the user.
"""

from __future__ import annotations

import json

from niels_gpt import __version__
from niels_gpt.export.audit_gate import Clearance
from niels_gpt.pretrained.find_model import is_repository
from niels_gpt.pretrained.public_base import PublicBase, public_base
from niels_gpt.report.document import Block, Document, Facts, Lead, Paragraph, Section, Text, markdown
from niels_gpt.report.run_report import NOT_RECORDED, data_blocks, read_facts, score_table
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.info import RunInfo, stored_scores
from niels_gpt.runs.loading import LoadedRun, history
from niels_gpt.system.console import plural
from niels_gpt.tokenizer import ByteTokenizer


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


def _metrics(facts: RunInfo | None) -> list[Block]:
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
