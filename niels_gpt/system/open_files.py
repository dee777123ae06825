"""How many files this process may have open: raise the limit where that is allowed, and name it where it is not enough.

A mapped shard of a token cache stays open, so a cache of a thousand shards needs more than the usual 1,024.
"""

from __future__ import annotations

import contextlib
import errno
import resource

_WANTED = 65_536
_NEEDED = 256
"""What a command needs without mapped shards, with room to spare."""


def raise_limit() -> None:
    """Raise the soft limit towards the hard one, which needs no privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def remedy(err: OSError) -> str:
    """What to do about too many open files, to be appended to the message; empty for any other error."""
    if err.errno == errno.ENFILE:
        return ": the limit of the whole system (sysctl fs.file-max) is reached; close other programs"
    if err.errno != errno.EMFILE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = f"at least {_NEEDED}" if limit < _NEEDED else f"more, e.g. {4 * limit:,}"
    return f": this process may open {limit:,} files (ulimit -n) and needs {need}, one per shard of a cache; raise it"
