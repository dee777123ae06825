"""Small limits for memory, descriptors and file sizes: a result or one clear line, and afterwards the same bytes."""

from __future__ import annotations

import random
import resource

from tests.campaign.fuzz import _address_space
from tests.campaign.lab import COMMANDS, Lab
from tests.campaign.processes import limited
from tests.campaign.verdicts import Verdict

NAMES = tuple(COMMANDS)


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Run a command under a limit, then without it."""
    name = NAMES[(number // 3) % len(NAMES)]
    kind, value, what = (
        lambda: (resource.RLIMIT_NOFILE, rng.randrange(6, 40), "open files"),
        lambda: (resource.RLIMIT_FSIZE, rng.choice((4096, 8192, 20000, 50000, 80000)), "bytes per file"),
        lambda: (resource.RLIMIT_AS, _address_space() + (rng.randrange(1, 400) << 20), "bytes of address space"),
    )[number % 3]()
    lab.reference(name)
    lab.reset(*COMMANDS[name].makes)
    told = f"{name} with at most {value} {what}"
    outcome = lab.run(COMMANDS[name], before=limited(kind, value))
    return lab.judge(name, told, outcome)
