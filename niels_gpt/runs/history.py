"""The runs that the weights of a run came from: `init_from`, followed back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from niels_gpt.config import RunConfig
from niels_gpt.config.public_model import folder_or_id, is_public
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import files


class PastRun(NamedTuple):
    """A run, and what its weights started from."""

    run: RunFolder
    config: RunConfig

    @property
    def start(self) -> Path | None:
        """The checkpoint that it started from, or the path of a public model; None: random weights."""
        return files.expand_home(folder_or_id(self.config.init_from)) if self.config.init_from else None

    @property
    def from_public(self) -> bool:
        """Whether it started from a public model that is not imported: `init_from: hf:...`."""
        return is_public(self.config.init_from)

    @property
    def earlier(self) -> RunFolder | None:
        """The folder of the run whose checkpoint it started from, which may be gone; None: it started from no run."""
        return None if self.start is None or self.from_public else RunFolder(self.start.parent.parent)


def history(run: RunFolder | None) -> Iterator[PastRun]:
    """Yield a run, then the run that its weights came from, and so on; ends where a folder is no run.

    A config.yaml that was edited can name a run twice: its second occurrence ends the history.
    """
    seen = set[Path]()
    while run is not None and run.exists and (path := run.path.resolve()) not in seen:
        seen.add(path)
        past = PastRun(run, run.read_config())
        yield past
        run = past.earlier
