"""Errors injected at the n-th system call of a command: every call of every command is tried in the long run."""

from __future__ import annotations

import errno
import random

from tests.campaign import shim
from tests.campaign.lab import COMMANDS, Lab
from tests.campaign.verdicts import Verdict

ERRORS = {
    "open": (errno.EACCES, errno.EIO, errno.ENOSPC, errno.EMFILE),
    "read": (errno.EIO, 0),
    "write": (errno.ENOSPC, errno.EIO, 0),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EACCES, errno.EIO, errno.ENOSPC),
    "mkdir": (errno.EACCES, errno.ENOSPC),
    "unlink": (errno.EACCES, errno.EIO),
    "mmap": (errno.ENOMEM, errno.EACCES),
    "link": (errno.EPERM, errno.EMLINK),
    "truncate": (errno.EIO,),
    "lock": (errno.ENOLCK,),
    "stat": (errno.EACCES, errno.EIO),
}
"""Errors of each kind of call; 0: a short read or write."""
NAMES = tuple(COMMANDS)


def case(lab: Lab, rng: random.Random, number: int) -> Verdict:
    """Disturb one call. The case numbers of a command go through all its calls, in an order given by the seed."""
    name = NAMES[number % len(NAMES)]
    counts = lab.counts(name)
    calls = [(call, n) for call in ERRORS for n in range(counts[call])]
    step = next(step for step in (7919, 7907, 7901) if len(calls) % step)  # a prime: visits every call once
    call, n = calls[(number // len(NAMES) * step + lab.seed) % len(calls)]
    error = rng.choice(ERRORS[call])
    lasting = error in (errno.ENOSPC, errno.EACCES, errno.EIO) and rng.random() < 0.3
    action = "shorten" if not error else "fail_from" if lasting else "fail"
    what = "is short" if not error else f"fails with {errno.errorcode[error]}" + (" from there on" if lasting else "")
    told = f"{name}: {call} {n} of {counts[call]} {what}"
    lab.reset(*COMMANDS[name].makes)
    outcome = lab.run(COMMANDS[name], fault=shim.Fault(call, n, action, error))
    return lab.judge(name, told, outcome)
