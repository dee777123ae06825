"""Two processes on the CPU, of which one is killed or stopped: the other ends with one line, and the run resumes."""

from __future__ import annotations

import random
import signal
import time

from tests.campaign.lab import COMMANDS, Lab, snapshot
from tests.campaign.processes import Outcome
from tests.campaign.verdicts import Verdict, failed, unclear

PATIENCE = 30.0
"""Seconds in which the other process must end after SIGTERM: torchrun then sends SIGKILL."""


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Kill or stop one of two processes, then resume with both."""
    name = rng.choice(("train_bytes", "train_tokens", "train_sft"))
    shard = rng.random() < 0.4
    words = (*COMMANDS[name].words, *(("--set", "engine.shard=true") if shard else ()))
    run = COMMANDS[name].makes[0]
    wanted = _reference(lab, name, words, run)
    lab.reset(*COMMANDS[name].makes)
    ranks = lab.start_ranks(words)
    victim, delay = rng.randrange(2), rng.uniform(0.0, 2.0)
    stop = rng.random() < 0.3
    told = (
        f"{name}{' sharded' if shard else ''}: process {victim} {'stopped' if stop else 'killed'} after {delay:.2f} s"
    )
    time.sleep(delay)
    ranks[victim].signal(signal.SIGSTOP if stop else signal.SIGKILL)
    if stop:
        time.sleep(1.0)
        ranks[victim].signal(signal.SIGCONT)
        outcomes = [rank.wait() for rank in ranks]
        reason = next(filter(None, map(_reason, outcomes)), "")
        if reason:
            return failed(told, reason)
    else:
        other = ranks[1 - victim].wait(5.0)
        if other is None:  # it may wait for a process that never came: torchrun ends it
            ranks[1 - victim].signal(signal.SIGTERM)
            other = ranks[1 - victim].wait(PATIENCE)
        if other is None:
            ranks[1 - victim].signal(signal.SIGKILL)
            ranks[1 - victim].wait()
            return failed(told, f"hang: the other process still runs {PATIENCE:.0f} s after SIGTERM")
        ranks[victim].wait()
        reason = _reason(other)
        if reason:
            return failed(told, f"the other process: {reason}")
        outcomes = [rank.wait() for rank in lab.start_ranks(words)]
        reason = next(
            filter(None, (_reason(outcome) or (outcome.err if outcome.code else "") for outcome in outcomes)), ""
        )
        if reason:
            return failed(told, f"resumed: {reason}")
    got = _result(lab, run)
    different = sorted(path for path in wanted.keys() | got.keys() if wanted.get(path) != got.get(path))
    return failed(told, f"after the fault {', '.join(different[:6])} differ") if different else Verdict("held", told)


def _reason(outcome: Outcome) -> str:
    """As `unclear`, but a process that is not the main one may end without a message."""
    if outcome.code == -signal.SIGTERM or (outcome.code == 1 and not outcome.err.strip()):
        return ""
    return unclear(outcome)


_references: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}


def _reference(lab: Lab, name: str, words: tuple[str, ...], run: str) -> dict[str, str]:
    key = (str(lab.base), words)
    if key not in _references:
        lab.reset(*COMMANDS[name].makes)
        for rank in lab.start_ranks(words):
            outcome = rank.wait()
            if outcome.code:
                raise RuntimeError(f"{' '.join(words)} in two processes: {outcome.err}")
        _references[key] = _result(lab, run)
    return _references[key]


def _result(lab: Lab, run: str) -> dict[str, str]:
    return {path: value for path, value in snapshot(lab.folder).items() if path.startswith(f"{run}/")}
