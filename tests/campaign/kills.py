"""SIGKILL at random instants, and aimed at system calls: the command, run again, gives the same bytes."""

from __future__ import annotations

import random
import signal

from tests.campaign import shim
from tests.campaign.lab import COMMANDS, WRITERS, Lab
from tests.campaign.verdicts import Verdict, failed, refused, unclear

AIMS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "link")
NAMES = tuple(WRITERS)


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Kill a command one to three times, then run it again."""
    name = NAMES[number % len(NAMES)]
    command = COMMANDS[name]
    counts = lab.counts(name)
    lab.reset(*command.makes)
    done = []
    for attempt in range(rng.choice((1, 1, 1, 2, 3))):
        aims = [aim for aim in AIMS if counts.get(aim)]
        words = command.words if not attempt else command.again or command.words
        if aims and rng.random() < 0.8:
            aim = rng.choice(aims)
            fault = shim.Fault(aim, rng.randrange(counts[aim]), rng.choice(("kill_before", "kill_after")))
            done.append(f"{fault.action.removeprefix('kill_')} {aim} {fault.number}")
            outcome = lab.run(words, fault=fault)
        else:
            seconds = rng.uniform(0.0, 1.0)
            done.append(f"after {seconds:.3f} s")
            running = lab.start(words)
            if running.wait(seconds) is None:
                running.signal(signal.SIGKILL)
            outcome = running.wait()
        reason = "" if outcome.code == -signal.SIGKILL else unclear(outcome)
        if reason:
            return failed(f"{name} killed {', '.join(done)}", reason)
    told = f"{name} killed {', '.join(done)}"
    for reader in (("runs", "list"), ("cache", "verify")):
        if reader == ("cache", "verify") and name == "tokenizer":
            continue
        outcome = lab.run(reader)
        reason = unclear(outcome) or (f"refuses: {outcome.err[-300:]}" if refused(outcome) else "")
        if reason:
            return failed(told, f"{' '.join(reader)} after the kill: {reason}")
    return lab.recover(name, told)
