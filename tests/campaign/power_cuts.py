"""Power cuts: everything that was not synced may be lost. The command, run again, gives the same bytes."""

from __future__ import annotations

import random
import shutil

from tests.campaign import shim
from tests.campaign.lab import COMMANDS, WRITERS, Lab
from tests.campaign.power_cut_model import apply_power_cut
from tests.campaign.verdicts import Verdict, failed, refused, unclear

NAMES = tuple(WRITERS)


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Cut the power at an event of a command (or after its end), then run it again."""
    name = NAMES[number % len(NAMES)]
    command = COMMANDS[name]
    total = lab.counts(name)["event"]
    log, before = lab.base / "log", lab.base / "before"
    for folder in (log, before):
        shutil.rmtree(folder, ignore_errors=True)
    lab.reset(*command.makes)
    shutil.copytree(lab.folder, before, symlinks=True)
    log.mkdir()
    at = rng.randrange(total + 1)
    outcome = lab.run(command, fault=shim.Fault("event", at, "kill_after", log=str(log)))
    if outcome.code == 0 and at < total - 8:
        return failed(f"{name}, power cut at event {at}", "the command ended before the cut: it is not deterministic")
    told = f"{name}, power cut at event {at} of {total}: {apply_power_cut(lab.folder, before, log, rng)}"
    for reader in (("runs", "list"), ("cache", "verify")):
        outcome = lab.run(reader)
        reason = unclear(outcome)
        if reason:
            return failed(told, f"{' '.join(reader)} after the cut: {reason}")
    outcome = lab.run(command.again or command.words)
    reason = unclear(outcome)
    if reason:
        return failed(told, f"after the cut: {reason}")
    if refused(outcome):
        return Verdict("noticed", told, outcome.err.strip()[-300:])
    difference = lab.differences(name, outcome, output=False)
    return (
        failed(told, f"after the cut: {difference}; {outcome.err.strip()[-300:]}")
        if difference
        else Verdict("held", told)
    )
