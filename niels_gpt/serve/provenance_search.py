"""Searches the training text of the served models; opens or builds their indexes in a thread, once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from niels_gpt.memorization.provenance import Provenance, find_overlaps, open_provenance
from niels_gpt.serve.errors import APIError
from niels_gpt.serve.served_model import ServedModel

PATIENCE = 5.0
"""Seconds that a request waits for an index."""
WAITING = 16
"""Most searches at a time; one runs, the others wait."""
SPANS = 20
"""Most overlaps in a response, the longest."""


class ProvenanceSearch:
    """The searches of a server. All methods are called in its event loop."""

    def __init__(self, closing: threading.Event) -> None:
        """closing: once it is set, an index that is being built is given up."""
        self._closing = closing
        self._opening: dict[str, asyncio.Task[Provenance]] = {}
        self._one = asyncio.Lock()
        self._searches = 0

    async def find(self, model: ServedModel, text: str) -> dict[str, Any]:
        """Return the overlaps of a text as JSON, without the paths of files.

        Raises APIError: 400 for a text or model that cannot be traced, 429 if too many searches wait, 503 while the
        index is built.
        """
        if self._searches >= WAITING:
            raise APIError(429, "too many searches wait; try again in 2 s", code="queue_full", retry_after=2)
        self._searches += 1
        try:
            provenance = await self._open(model)
            async with self._one:
                overlaps = await asyncio.to_thread(find_overlaps, provenance, text)
        except ValueError as err:
            raise APIError(400, str(err), param="text", code="invalid_value") from None
        finally:
            self._searches -= 1
        found = overlaps.as_json()
        del found["lengths"]
        found["more_spans"] = max(0, len(found["spans"]) - SPANS)
        found["spans"] = found["spans"][:SPANS]
        for span in found["spans"]:
            for passage in span["passages"]:
                del passage["file"]  # a path of the server's machine
        found["problems"] = len(found["problems"])  # they name paths
        return found

    @contextlib.contextmanager
    def _stages(self, title: str) -> Iterator[Callable[[int, int | None], None]]:
        """A stage of the building of an index; its reports raise RuntimeError once the server ends."""

        def report(done: int, total: int | None) -> None:
            if self._closing.is_set():
                raise RuntimeError(f"the server has ended: {title} was given up")

        yield report

    async def _open(self, model: ServedModel) -> Provenance:
        loaded = model.loaded
        if loaded is None:
            raise APIError(400, f"the training text of {model.id} is not known", param="model", code="no_training_text")
        task = self._opening.get(model.id)
        if task is None:
            opened = asyncio.to_thread(open_provenance, loaded, self._stages)
            task = self._opening[model.id] = asyncio.create_task(opened)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no request waits for it
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if not done:
            raise APIError(
                503,
                f"the index of the training text of {model.id} is being built; try again in 2 s",
                code="index_building",
                retry_after=2,
            )
        try:
            return task.result()
        except (OSError, ValueError) as err:
            del self._opening[model.id]  # the text may be there the next time
            reason = "cannot be written" if isinstance(err, OSError) else "cannot be built from its sources"
            raise APIError(
                400,
                f"the index of the training text of {model.id} {reason}; niels-gpt research trace prints why",
                param="model",
                code="no_training_text",
            ) from err
