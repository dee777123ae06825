"""Mutated input of every kind: a result or one clear line; never a traceback, a crash, a hang or much memory."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaign import mutations
from tests.campaign.lab import BUILD, COMMANDS, TOKENS, Lab
from tests.campaign.processes import Running, limited
from tests.campaign.verdicts import Verdict, failed, refused, unclear

Change = Callable[[bytes, random.Random], bytes]


def _text(change: Callable[[str, random.Random], str]) -> Change:
    def changed(data: bytes, rng: random.Random) -> bytes:
        return change(data.decode("utf-8"), rng).encode("utf-8", "replace")

    return changed


TEXT, JSON, BYTES = _text(mutations.mutate_text), _text(mutations.mutate_json_text), mutations.mutate_bytes
NOTE_OPTIONS = ("--respect-front-matter", "--strip-front-matter", "--links", "text", "--encoding-errors", "replace")
INPUTS: tuple[tuple[str, Change, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
    # path, how it is changed, commands that read it, what is removed before
    ("c.yaml", TEXT, (
        ("train", "--config", "c.yaml", "--print-config"),
        ("train", "--config", "c.yaml", *TOKENS, "--print-config"),
        ("data", "list", "--config", "c.yaml"),
        ("splice", "coverage", "--config", "c.yaml", "--set", "task=splice", "--steps", "3", "--json"),
    ), ()),
    ("p.yaml", TEXT, (("pipeline", "--config", "p.yaml", "--print-config"),), ()),
    ("web.jsonl", JSON, (
        ("cache", "build", "web", *BUILD), ("data", "stats", "web", "--config", "c.yaml"),
        ("data", "show", "web", "--config", "c.yaml", "--json"),
    ), ("cache/pretrain/web",)),
    ("web.parquet", BYTES, (
        ("cache", "build", "table", *BUILD), ("data", "stats", "table", "--config", "c.yaml"),
        ("data", "show", "table", "--config", "c.yaml"),
    ), ()),
    ("chats.jsonl", JSON, (
        ("cache", "build", "talk", *BUILD), ("data", "stats", "talk", "--config", "c.yaml"),
        ("data", "show", "talk", "--config", "c.yaml"), COMMANDS["new_bytes"].words,
    ), ("cache/sft/talk",)),
    ("primer.txt", TEXT, (
        ("cache", "build", "primer", "--path", "primer.txt", *BUILD), COMMANDS["new_bytes"].words,
        ("data", "stats", "primer", "--path", "primer.txt"),
    ), ("cache/sft/primer", "streams")),
    ("primer.txt", BYTES, (COMMANDS["new_bytes"].words,), ("streams",)),
    ("notes/note_03.md", lambda data, rng: _front_matter(data, rng), (
        ("notes", "check", "notes"), ("cache", "build", "roam", "--path", "notes", *NOTE_OPTIONS, *BUILD),
        ("data", "show", "roam", "--path", "notes", *NOTE_OPTIONS),
    ), ("cache/pretrain/roam",)),
    ("notes/note_04.md", BYTES, (("notes", "check", "notes"), COMMANDS["new_bytes"].words), ("streams",)),
    ("notes/.nielsignore", lambda data, rng: TEXT(b"*.tmp\n!note_0*\n/x/**\n", rng), (("notes", "check", "notes"),),
    ()),
    ("q.jsonl", JSON, (COMMANDS["questions"].words,), ()),
    ("runs/bytes/checkpoints/best.pt", BYTES, (COMMANDS["generate_bytes"].words, COMMANDS["eval_bytes"].words), ()),
    ("runs/bytes/checkpoints/latest.pt", BYTES, (COMMANDS["resume_bytes"].words, COMMANDS["show_bytes"].words), ()),
    ("runs/bytes/metrics.jsonl", JSON, (
        COMMANDS["show_bytes"].words, COMMANDS["list"].words, COMMANDS["compare"].words, COMMANDS["resume_bytes"].words,
    ), ()),
    ("runs/tokens/config.yaml", TEXT, (
        COMMANDS["show_tokens"].words, COMMANDS["generate_tokens"].words, COMMANDS["list"].words,
        COMMANDS["batch_tokens"].words,
    ), ()),
    ("cache/pretrain/web/meta.json", JSON, (
        COMMANDS["verify"].words, COMMANDS["inspect"].words, COMMANDS["new_tokens"].words,
        COMMANDS["build_again"].words,
    ), ()),
    ("cache/sft/talk/meta.json", JSON, (
        COMMANDS["verify"].words, COMMANDS["inspect_sft"].words, COMMANDS["lint"].words, COMMANDS["new_sft"].words,
    ), ()),
    ("cache/sft/talk/train_idx.npy", BYTES, (
        COMMANDS["verify"].words, COMMANDS["inspect_sft"].words, COMMANDS["new_sft"].words, COMMANDS["lint"].words,
    ), ()),
    ("cache/pretrain/web/train/documents.npy", BYTES, (
        COMMANDS["verify"].words, COMMANDS["inspect"].words, COMMANDS["memorize_tokens"].words,
    ), ()),
    ("cache/tokenizer/spm.model", BYTES, (COMMANDS["build_table"].words, COMMANDS["new_tokens"].words), ()),
    ("runs/tokens/tokenizer.model", BYTES, (COMMANDS["generate_tokens"].words, COMMANDS["resume_tokens"].words), ()),
    ("streams/roam_train.meta.json", JSON, (COMMANDS["new_bytes"].words, COMMANDS["eval_bytes"].words), ()),
    ("runs/splice/memorization/report.json", JSON, (COMMANDS["fit"].words, COMMANDS["memorize_splice"].words), ()),
    ("runs/bytes/checkpoints/config.json", JSON, (COMMANDS["generate_bytes"].words, COMMANDS["show_bytes"].words), ()),
    ("", BYTES, (COMMANDS["chat"].words,), ()),
    ("", TEXT, (("generate", "runs/tokens", "-", "--seed", "1", "--max-tokens", "4"),), ()),
    ("COMMAND LINE", BYTES, tuple(command.words for command in COMMANDS.values()), ()),
    ("COMMAND LINE", BYTES, tuple(command.words for command in COMMANDS.values()), ()),
    ("SET", BYTES, (COMMANDS["train_bytes"].words,), ()),
)  # fmt: skip
CHAT = b"hello\n/system be brief\nwhat is a note?\n/reset\n/help\nhi there\n/exit\n"
OPTIONS = (
    "--config", "--run-dir", "--steps", "--set", "--notes", "--primer", "--source", "--exclude", "--encoding-errors",
    "--device",
    "--threads", "--json", "--quiet", "--seed", "--max-tokens", "--top-k", "--top-p", "--min-p",
    "--repetition-penalty", "--temperature",
    "-n", "--stop", "--window",
    "--prompt", "--stride", "--greedy", "--documents", "--controls", "--select", "--text", "--top", "--out",
    "--cache-dir", "--limit",
    "--split", "--precision", "--tokenizer", "--vocab-size", "--shard-bytes", "--val-frac", "--train-tokens",
    "--weights", "--threshold",
    "--control", "--step", "--chars", "--tokens", "--path", "--force", "--resume", "--verify", "--links",
)  # fmt: skip
SECONDS = 40.0
PROGRESS_SECONDS = 30.0
"""Time in which a training must print or write something."""
TRAIN = ("train", "pipeline")
"""Commands that may rightly run longer than SECONDS: without options they train the defaults."""
MEMORY = 6 << 30
"""Address space above that of the campaign: a command that asks for more must refuse, not be killed."""


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Change one input, and run a command that reads it."""
    path, change, commands, without = INPUTS[number % len(INPUTS)]
    words, stdin = rng.choice(commands), CHAT
    lab.reset(*without)
    if path == "COMMAND LINE":
        words = mutations.mutate_words(words, rng, OPTIONS)
        if words[0] == "clean" or any(word.startswith("/") and word != "/dev/null/x" for word in words):
            words = words[:1]
    elif path == "SET":
        words = (*words, "--set", _setting(rng))
    elif path:
        file = lab.folder / path
        file.write_bytes(change(file.read_bytes() if file.exists() else b"", rng))
    else:
        stdin = change(CHAT, rng)
    told = f"{path or 'standard input'}: {' '.join(words)!r}"
    running = lab.start(words, stdin=stdin, before=limited(resource.RLIMIT_AS, _address_space() + MEMORY))
    outcome = running.wait(SECONDS)
    if outcome is None:
        if words[0] in TRAIN and makes_progress(running, lab.folder):
            return Verdict("held", told, "a training that makes progress")
        running.signal(signal.SIGKILL)
        running.wait()
        return failed(told, f"hang: still running after {SECONDS:.0f} s")
    reason = unclear(outcome)
    if reason:
        return failed(told, reason)
    return Verdict("noticed" if refused(outcome) else "held", told, outcome.err.strip()[-200:])


def makes_progress(running: Running, folder: Path) -> bool:
    """Whether a command that still runs prints or writes something, or ends, in PROGRESS_SECONDS; kill it then."""
    end = time.monotonic() + PROGRESS_SECONDS
    before, moved = _sizes(folder, running), False
    while not moved and time.monotonic() < end:
        moved = running.wait(0.5) is not None or _sizes(folder, running) != before
    running.signal(signal.SIGKILL)
    running.wait()
    return moved


def _sizes(folder: Path, running: Running) -> dict[Path, tuple[int, int]]:
    sizes = {}
    for path in (*folder.rglob("*"), *running.outputs):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            sizes[path] = (status.st_size, status.st_mtime_ns)
    return sizes


def _setting(rng: random.Random) -> str:
    """Return KEY=VALUE with a value that is mostly wrong. Sizes that are merely large are not drawn."""
    keys = (
        "train.base_lr", "train.min_lr", "train.B", "train.seed", "train.betas", "train.p_train", "train.warmup_steps",
        "train.weight_decay", "train.optimizer", "train.precision", "model.dropout", "model.norm", "model.H", "model.D",
        "model.n_kv_heads", "model.rope_theta", "data.roam", "data.primer", "data.seed", "data.sources",
        "data.notes.exclude",
        "data.roam_val_frac", "output.keep", "output.eval_steps", "output.sample_prompt", "engine.prefetch",
        "engine.compile",
        "train.grad_clip", "model.tie_embeddings", "model.positions", "model.mlp", "model.d_ff", "train", "data", "",
        "x.y",
    )  # fmt: skip
    values = (*mutations.NASTY, *(json.dumps(value) for value in mutations.VALUES))
    return f"{rng.choice(keys)}={rng.choice(values)}".replace("\0", "")


def _front_matter(data: bytes, rng: random.Random) -> bytes:
    matter = "---\ntitle: a note\ntags: [x, y]\npublish: false\nprivate: no\ndate: 2024-01-02\n---\n"
    text = matter + data.decode("utf-8") + "\n[[target|label]] and [[other]] `[[code]]`\n```\n[[x]]\n```\n"
    return TEXT(text.encode("utf-8"), rng)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()
