"""One flipped bit in a file that is read: it is noticed, or changes nothing."""

from __future__ import annotations

import os
import random
import re
import signal

from tests.campaign import shim
from tests.campaign.lab import COMMANDS, Lab
from tests.campaign.verdicts import Verdict, failed, refused, reports_a_problem, unclear

READERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("token shard", r"cache/pretrain/(web|roam)/\w+/shard_\d+\.bin",
     ("new_tokens", "resume_tokens", "eval_tokens", "batch_tokens", "audit_tokens", "memorize_tokens", "verify")),
    ("document index", r"cache/pretrain/(web|roam)/\w+/documents\.npy",
     ("new_tokens", "resume_tokens", "eval_tokens", "audit_tokens", "memorize_tokens", "verify")),
    ("SFT tokens", r"cache/sft/\w+/\w+_tokens\.bin",
     ("new_sft", "resume_sft", "eval_sft", "batch_sft", "lint", "verify")),
    ("SFT index", r"cache/sft/\w+/\w+_idx\.npy", ("new_sft", "resume_sft", "eval_sft", "batch_sft", "lint", "verify")),
    ("pretrain meta", r"cache/pretrain/(web|roam)/meta\.json",
     ("new_tokens", "resume_tokens", "eval_tokens", "memorize_tokens", "build_again", "verify")),
    ("SFT meta", r"cache/sft/\w+/meta\.json",
     ("new_sft", "resume_sft", "eval_sft", "lint", "verify", "build_chats_again")),
    ("stream", r"streams/\w+\.bin", ("new_bytes", "resume_bytes", "eval_bytes", "batch_bytes", "memorize", "audit")),
    ("stream meta", r"streams/\w+\.meta\.json",
     ("new_bytes", "resume_bytes", "eval_bytes", "batch_bytes", "memorize", "audit")),
    ("tokenizer", r"cache/tokenizer/spm\.model", ("new_tokens", "build_table", "build_again", "verify")),
    ("tokenizer meta", r"cache/tokenizer/meta\.json", ("new_tokens", "build_table", "build_again", "verify")),
    ("tokenizer of a run", r"runs/(tokens|sft)/tokenizer\.model",
     ("resume_tokens", "eval_tokens", "generate_tokens", "audit_tokens", "chat", "questions", "resume_sft")),
    ("config of a run", r"runs/(bytes|tokens|sft|splice)/config\.yaml",
     ("resume_bytes", "resume_tokens", "resume_sft", "resume_splice", "eval_bytes", "eval_tokens", "show_bytes",
      "show_tokens", "batch_tokens", "list")),
    ("metrics", r"runs/(bytes|tokens)/metrics\.jsonl",
     ("resume_bytes", "resume_tokens", "show_bytes", "show_tokens", "list", "compare")),
    ("checkpoint", r"runs/(bytes|tokens|sft|splice)/checkpoints/\w+\.pt",
     ("resume_bytes", "resume_tokens", "resume_sft", "resume_splice", "eval_bytes", "eval_tokens", "generate_bytes",
      "generate_tokens", "chat", "memorize", "show_bytes", "new_sft", "audit_tokens")),
    ("checkpoint config", r"runs/(bytes|tokens|sft)/checkpoints/config\.json",
     ("resume_bytes", "resume_tokens", "eval_bytes", "generate_bytes", "generate_tokens", "chat", "show_bytes")),
    ("sharded checkpoint", r"runs/sharded/checkpoints/.*(distcp|metadata|json)", ("resume_sharded",
    "generate_sharded")),
    ("report", r"runs/splice/memorization/report\.json", ("fit",)),
    ("compiled kernel", r"native/.*", ("new_native",)),
    ("pipeline", r"runs/pipe/.*(yaml|json|jsonl|pt|model)", ("pipeline_again",)),
    ("partial build", r"cache/pretrain/\.web\.partial/.*", ("build_web",)),
)  # fmt: skip
"""(what, pattern of its paths, commands that read it)."""
KIND_OF_RUN = {"bytes": "bytes", "tokens": "tokens", "sft": "sft", "splice": "splice"}


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Flip a bit of a file, and run two of its readers."""
    what, pattern, readers = READERS[number % len(READERS)]
    if what == "partial build" and not shim.loaded():
        return Verdict("harmless", "partial build: needs the shim")
    cut = rng.randrange(20, 180) if what == "partial build" else 0
    prepare(lab, what, cut)
    paths = sorted(
        str(path.relative_to(lab.folder))
        for path in lab.folder.rglob("*")
        if path.is_file() and path.stat().st_size and re.fullmatch(pattern, str(path.relative_to(lab.folder)))
    )
    # The name of a temporary file has the id of its process: the next build writes another.
    paths = [path for path in paths if not re.search(r"\.lock$|\.\d+\.\d+\.tmp$", path)]
    if not paths:
        return Verdict("harmless", f"{what}: no such file at event {cut}")
    path = rng.choice(paths)
    data = bytearray((lab.folder / path).read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    run = next((name for name in KIND_OF_RUN if path.startswith(f"runs/{name}/")), "")
    fitting = [name for name in readers if not run or run in " ".join(COMMANDS[name].words) or name == "list"]
    verdict = Verdict("harmless", "")
    for name in rng.sample(fitting, min(2, len(fitting))):
        told = f"{what}: bit {bit} of byte {place} of {path}, read by {name}"
        lab.reference(name)
        prepare(lab, what, cut, *COMMANDS[name].makes)
        verdict = max(_read(lab, name, path, bytes(data), told), verdict, key=_rank)
        if verdict.result == "failed":
            break
    return verdict


def _rank(verdict: Verdict) -> int:
    return ("harmless", "held", "noticed", "failed").index(verdict.result)


def prepare(lab: Lab, what: str, cut: int, *without: str) -> None:
    """Restore the lab, without what the reader will write; for a partial build, kill a build at an event."""
    if what != "partial build":
        lab.reset(*without)
        return
    lab.reset("cache/pretrain/web")
    log = lab.base / "log"
    log.mkdir(exist_ok=True)
    outcome = lab.run(COMMANDS["build_web"], fault=shim.Fault("event", cut, "kill_after", log=str(log)))
    assert outcome.code in (0, -signal.SIGKILL), outcome.err


def _read(lab: Lab, name: str, path: str, damaged: bytes, told: str) -> Verdict:
    file = lab.folder / path
    if not file.is_file():  # the kill of a build, repeated, came a write earlier or later
        return Verdict("harmless", f"{told}: not there this time")
    intact, times = file.read_bytes(), file.stat()

    def write(data: bytes) -> None:
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # a disk that fails does not set the time

    write(damaged)
    outcome = lab.run(COMMANDS[name])
    reason = unclear(outcome)
    if reason:
        return failed(told, reason)
    if refused(outcome):
        if file.parent.exists():
            write(intact)
        again = lab.run(COMMANDS[name])
        difference = unclear(again) or (again.err if again.code else "") or lab.differences(name, again)
        if difference:
            return failed(told, f"noticed ({outcome.err.strip()[-200:]}), but with the file restored: {difference}")
        return Verdict("noticed", told, outcome.err.strip()[-300:])
    if file.is_file() and file.read_bytes() == damaged:
        write(intact)  # untouched: only what else the command gave counts
    # A build that finds a damaged cache builds it again and says so: only its files count.
    difference = lab.differences(name, outcome, output=not name.startswith("build"))
    if not difference:
        return Verdict("harmless", told)
    if reports_a_problem(outcome):
        return Verdict("noticed", told, outcome.err.strip()[-300:])
    return failed(told, f"silent: exit code 0, no message: {difference}")
