"""Batches made ahead of the device, in a thread: a GPU never waits for rows to be gathered or copied."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from niels_gpt.training.tasks.base import Batch


class Prefetcher:
    """The batches of steps first, first + 1, ..., in order; as a context it ends its thread.

    On CUDA up to `ahead` of them are made in a thread, pinned, and copied on a stream of their own while the device
    works on those before. Elsewhere, or with ahead=0, each is made when it is asked for: there the processor that
    would make it is the one that trains. An error in the making is raised by `next`.
    """

    def __init__(self, make: Callable[[int], Batch], *, first: int, last: int, device: str, ahead: int) -> None:
        self._make, self._device, self._step = make, torch.device(device), first
        self._thread: threading.Thread | None = None
        if self._device.type == "cuda" and ahead > 0 and first < last:
            self._copies = torch.cuda.Stream(self._device)
            self._ready: queue.Queue[tuple[Batch, torch.cuda.Event] | Exception] = queue.Queue(ahead)
            self._closed = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(first, last), daemon=True, name="feeder")
            self._thread.start()

    def next(self) -> Batch:
        """The next batch, on the device (its segments stay where the model wants them: on the CPU)."""
        if self._thread is None:
            batch = self._make(self._step)
            self._step += 1
            return batch.to(self._device)
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        batch, copied = found
        stream = torch.cuda.current_stream(self._device)
        copied.wait(stream)
        for part in batch:
            if part is not None and part.is_cuda:
                part.record_stream(stream)  # it was made on another stream: do not reuse its memory before
        return batch

    def _work(self, first: int, last: int) -> None:
        try:
            if self._device.index is not None:  # a thread begins with the first GPU, which may be another process's
                torch.cuda.set_device(self._device)
            for step in range(first, last):
                made = self._make(step).pinned()
                with torch.cuda.stream(self._copies):
                    batch = made.to(self._device)
                    copied = torch.cuda.Event()
                    copied.record(self._copies)
                if not self._put((batch, copied)):
                    return
        except Exception as err:
            self._put(err)

    def _put(self, item: tuple[Batch, torch.cuda.Event] | Exception) -> bool:
        """Whether it was taken: not if nobody will ask any more."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None and not isinstance(error, torch.AcceleratorError):
            self._closed.set()
            self._thread.join()  # not where the device failed: pinned memory that is freed then ends the process
