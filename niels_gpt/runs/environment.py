"""environment.json of a run: which command trained which steps, on which machine, with which versions and data.

A run that is resumed has one session per start. A session without an end was killed, or is still training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.console import error_message, one_line, optional_write
from niels_gpt.system.program import command_line

FILE = "environment.json"
FINISHED, STOPPED, DIVERGED, FAILED = "finished", "stopped", "diverged", "failed"
"""How a session ends; STOPPED by a signal."""


@dataclasses.dataclass
class Session:
    """One start of a run."""

    step: int
    """Steps that were done before."""
    started: str
    """UTC, ISO 8601."""
    command: str | None
    """What was typed; None if `niels_gpt.train` was called from Python."""
    folder: str
    """The working directory of the command."""
    processes: int
    machine: dict[str, Any]
    """`system.machine.machine_facts`."""
    ended: str | None = None
    outcome: str | None = None
    """FINISHED, STOPPED, DIVERGED or FAILED; None: killed, or still training."""
    reason: str = ""
    """The signal or the error."""
    steps: int | None = None
    """Steps that were done at its end."""


@dataclasses.dataclass
class Environment:
    """The content of environment.json."""

    sessions: list[Session] = dataclasses.field(default_factory=list)
    data: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The sources at the last start; see `training.tasks.registry.sources_with_licences`."""
    fingerprint: dict[str, str] = dataclasses.field(default_factory=dict)
    """sha256 of the training data by source."""


def read_environment(run: Path) -> Environment | None:
    """Return what a run recorded; None for a run of an older version, and, with a warning, for a damaged file."""
    path = run / FILE
    try:
        stored = read_checked_json(path)
        sessions = [Session(**_known(Session, session)) for session in stored["sessions"]]
        return Environment(sessions, list(stored["data"]), dict(stored["fingerprint"]))
    except FileNotFoundError:
        return None
    except (OSError, DamagedJSON, LookupError, TypeError, AttributeError) as err:
        reason = error_message(err) if isinstance(err, OSError | DamagedJSON) else "it has another format"
        warnings.warn(one_line(f"{path} cannot be read: {reason}"), stacklevel=1)
        return None


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields: a newer version may record more."""
    return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}


@contextlib.contextmanager
def recorded_session(
    run: Path,
    *,
    step: int,
    processes: int,
    machine: Mapping[str, Any],
    data: Sequence[Mapping[str, Any]],
    fingerprint: Mapping[str, str],
    write: bool = True,
) -> Iterator[Session]:
    """Record a start of a run and, when the block ends, how it ended. A file that cannot be written is a warning.

    write: False on the processes that write nothing. The block sets `steps`, and `outcome` and `reason` unless it ends
    with an exception: then it FAILED.
    """
    earlier = read_environment(run) if write else None
    session = Session(step, _now(), command_line(), str(Path.cwd()), processes, dict(machine))
    environment = Environment([*(earlier.sessions if earlier else []), session], list(map(dict, data)))
    environment.fingerprint = dict(fingerprint)

    def store() -> None:
        if write:
            write_checked_json(run / FILE, dataclasses.asdict(environment))

    with optional_write(run / FILE):
        store()
    try:
        yield session
    except BaseException as err:
        session.outcome, session.reason = session.outcome or FAILED, one_line(error_message(err) or type(err).__name__)
        with contextlib.suppress(OSError):  # that error is the one line to print
            session.ended = _now()
            store()
        raise
    session.ended = _now()
    with optional_write(run / FILE):
        store()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
