"""Readers and writers at once: each gives a right result or one clear line, and what remains is whole."""

from __future__ import annotations

import random
import shutil
import time

from tests.campaign.lab import BUILD, COMMANDS, Lab, snapshot
from tests.campaign.verdicts import Verdict, failed, refused, unclear

TRAIN = ("train", "--config", "c.yaml", "--threads", "1", "--offline", "--quiet")


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    return SCENES[number % len(SCENES)](lab, rng)


def rebuild_while_training(lab: Lab, rng: random.Random) -> Verdict:
    """Training reads a cache that another process rebuilds, from other texts or in other shards."""
    lab.reference("new_tokens")
    lab.reset()
    other = rng.random() < 0.7
    if other:
        lines = (lab.folder / "web.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (lab.folder / "other.jsonl").write_text("".join(reversed(lines[5:])), encoding="utf-8")
    words = ("cache", "build", "web", "--shard-bytes", rng.choice(("1400", "2400")), "--force", *BUILD)
    if other:
        (lab.folder / "web.jsonl").write_bytes((lab.folder / "other.jsonl").read_bytes())
        (lab.folder / "other.jsonl").unlink()
    delay = rng.uniform(0.0, 0.8)
    told = f"train while the cache is rebuilt {delay:.2f} s later" + (" from other texts" if other else "")
    training = lab.start(COMMANDS["new_tokens"])
    time.sleep(delay)
    building = lab.start(words)
    trained, built = training.wait(), building.wait()
    reason = unclear(trained) or unclear(built)
    if reason:
        return failed(told, reason)
    if refused(built):
        return failed(told, f"the build: {built.err.strip()[-300:]}")
    if refused(trained):
        return Verdict("noticed", told, trained.err.strip()[-300:])
    got = {path: value for path, value in snapshot(lab.folder).items() if path.startswith("runs/new/")}
    wanted = {path: value for path, value in lab.reference("new_tokens").files.items() if path.startswith("runs/new/")}
    if _same(got, wanted):
        return Verdict("held", told)
    shutil.rmtree(lab.folder / "runs/new")  # or a run of the new cache, throughout
    outcome = lab.run(COMMANDS["new_tokens"])
    fresh = {path: value for path, value in snapshot(lab.folder).items() if path.startswith("runs/new/")}
    if outcome.code == 0 and _same(got, fresh):
        return Verdict("held", told)
    return failed(told, "silent: the run equals neither one on the old cache nor one on the new")


def _same(first: dict[str, str], second: dict[str, str]) -> bool:
    return first == second


def many_trainings(lab: Lab, rng: random.Random) -> Verdict:
    """Four trainings without --run-dir, at nearly the same time; half of the cases have no streams yet."""
    lab.reference("new_bytes")
    without = ("streams",) if rng.random() < 0.5 else ()
    lab.reset(*without)
    before = {path.name for path in (lab.folder / "runs").iterdir()}
    gap = rng.choice((0.0, 0.01, 0.1))
    told = f"four trainings without --run-dir, {gap} s apart" + (", streams to build" if without else "")
    running = []
    for _ in range(4):
        running.append(lab.start(TRAIN))
        time.sleep(gap)
    for command in running:
        outcome = command.wait()
        reason = unclear(outcome) or (outcome.err.strip()[-300:] if refused(outcome) else "")
        if reason:
            return failed(told, reason)
    runs = [path for path in (lab.folder / "runs").iterdir() if path.name not in before]
    digests = {snapshot(path)["checkpoints/latest.pt"] for path in runs}
    if len(runs) != 4 or digests != {lab.reference("new_bytes").files["runs/new/checkpoints/latest.pt"]}:
        return failed(told, f"{len(runs)} runs with {len(digests)} different results")
    return Verdict("held", told)


def one_folder(lab: Lab, rng: random.Random) -> Verdict:
    """Two or three of the same command into the same folder: one does it, the others wait or refuse."""
    name = rng.choice(("train_bytes", "train_tokens", "build_web", "build_chats", "build_new", "rebuild_web",
    "pipeline",
                       "tokenizer", "memorize", "audit"))  # fmt: skip
    lab.reference(name)
    command = COMMANDS[name]
    lab.reset(*command.makes)
    delays = [rng.uniform(0, 0.4) for _ in range(rng.choice((1, 2)))]
    told = f"{name} at once, others {', '.join(f'{delay:.2f}' for delay in delays)} s later"
    running = [lab.start(command)]
    for delay in delays:
        time.sleep(delay)
        running.append(lab.start(command))
    outcomes = [command.wait() for command in running]
    for outcome in outcomes:
        reason = unclear(outcome)
        if reason:
            return failed(told, reason)
    if all(refused(outcome) for outcome in outcomes):
        return failed(told, f"none succeeded: {outcomes[0].err.strip()[-200:]}")
    return lab.recover(name, told, result="noticed" if any(map(refused, outcomes)) else "held")


def readers_while_writing(lab: Lab, rng: random.Random) -> Verdict:
    """Short readers, one after the other, while a writer works: no reader sees anything partial."""
    name = rng.choice(("train_bytes", "resume_tokens", "rebuild_web", "build_web", "train_sft", "pipeline", "memorize"))
    lab.reference(name)
    command = COMMANDS[name]
    lab.reset(*command.makes)
    writing = lab.start(command)
    seen = []
    while writing.wait(0) is None and len(seen) < 12:
        reader = rng.choice(("list", "show_tokens", "verify", "inspect", "generate_tokens", "batch_sft", "lint"))
        seen.append(reader)
        outcome = lab.run(COMMANDS[reader])
        reason = unclear(outcome)
        if reason:
            writing.signal(9)
            writing.wait()
            return failed(f"{reader} during {name}", reason)
        if refused(outcome) and reader == "verify" and name not in ("build_web",):
            writing.signal(9)
            writing.wait()
            return failed(f"{reader} during {name}", f"refuses: {outcome.err.strip()[-300:]}")
    told = f"{name} with readers {', '.join(seen)}"
    outcome = writing.wait()
    reason = (
        unclear(outcome)
        or (outcome.err.strip() if outcome.code else "")
        or lab.differences(name, outcome, output=False)
    )
    return failed(told, reason) if reason else Verdict("held", told)


def two_builders(lab: Lab, rng: random.Random) -> Verdict:
    """Two builds in one folder without a tokenizer: both use the same tokenizer, or one refuses."""
    lab.reset("cache")
    delay = rng.uniform(0, 0.3)
    told = f"two sources built into one new folder, {delay:.2f} s apart"
    first = lab.start(("cache", "build", "web", "--cache-dir", "fresh", *BUILD))
    time.sleep(delay)
    second = lab.start(("cache", "build", "talk", "--cache-dir", "fresh", *BUILD))
    outcomes = [first.wait(), second.wait()]
    for outcome in outcomes:
        reason = unclear(outcome)
        if reason:
            return failed(told, reason)
    outcome = lab.run(("cache", "verify", "--cache-dir", "fresh"))
    reason = unclear(outcome) or (outcome.err.strip() if outcome.code else "")
    if reason:
        return failed(told, f"verify: {reason}")
    return Verdict("noticed" if any(map(refused, outcomes)) else "held", told)


def streams_cleaned(lab: Lab, rng: random.Random) -> Verdict:
    """`clean --yes` while byte trainings build and read streams in the user's cache folder."""
    lab.reference("new_bytes")
    lab.reset("streams")
    words = (*COMMANDS["new_bytes"].words, "--set", "data.cache_dir=auto")
    training = lab.start(words)
    delay = rng.uniform(0.0, 0.8)
    time.sleep(delay)
    told = f"clean --yes {delay:.2f} s after a training began"
    for _ in range(3):
        outcome = lab.run(("clean", "--yes"))
        reason = unclear(outcome)
        if reason:
            training.signal(9)
            training.wait()
            return failed(told, f"clean: {reason}")
    outcome = training.wait()
    reason = unclear(outcome)
    if reason:
        return failed(told, reason)
    if refused(outcome):
        return Verdict("noticed", told, outcome.err.strip()[-300:])
    wanted = lab.reference("new_bytes").files["runs/new/checkpoints/latest.pt"]
    if snapshot(lab.folder)["runs/new/checkpoints/latest.pt"] != wanted:
        return failed(told, "silent: other weights")
    return Verdict("held", told)


def removed_while_training(lab: Lab, rng: random.Random) -> Verdict:
    """The run folder, or the notes, or the cache disappear during a training: one line."""
    name, gone = rng.choice((
        ("train_bytes", "runs/bytes"), ("train_bytes", "notes"), ("train_tokens", "cache/pretrain/web"),
        ("train_tokens", "cache/tokenizer"), ("train_sft", "runs/tokens"), ("train_bytes", "streams"),
        ("build_web", "web.jsonl"), ("build_web", "cache"), ("memorize", "runs/bytes"), ("pipeline", "runs/pipe"),
    ))  # fmt: skip
    command = COMMANDS[name]
    lab.reference(name)
    lab.reset(*command.makes)
    running = lab.start(command)
    delay = rng.uniform(0.0, 0.8)
    time.sleep(delay)
    path = lab.folder / gone
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    outcome = running.wait()
    told = f"{gone} removed {delay:.2f} s after {name} began"
    reason = unclear(outcome)
    if reason:
        return failed(told, reason)
    return Verdict("noticed" if refused(outcome) else "held", told, outcome.err.strip()[-300:])


SCENES = (
    rebuild_while_training, one_folder, readers_while_writing, many_trainings, two_builders, streams_cleaned,
    removed_while_training,
)  # fmt: skip
