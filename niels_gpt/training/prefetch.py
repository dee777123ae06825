"""Prefetch batches in a thread, so that a GPU never waits for rows to be gathered or copied."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from niels_gpt.training.tasks.base import Batch


class Prefetcher:
    """The batches of steps first, first + 1, ..., last - 1, in order. Leaving the context ends the thread.

    On CUDA a thread builds up to `ahead` batches, pins them, and copies them on a separate stream while the device
    computes earlier steps. On other devices, or with ahead=0, `next` builds each batch itself: there the same
    processor trains. An error while building a batch is raised by `next`.
    """

    def __init__(self, build: Callable[[int], Batch], *, first: int, last: int, device: str, ahead: int) -> None:
        self._build, self._device, self._step = build, torch.device(device), first
        self._thread: threading.Thread | None = None
        if self._device.type == "cuda" and ahead > 0 and first < last:
            self._copy_stream = torch.cuda.Stream(self._device)
            self._ready: queue.Queue[tuple[Batch, torch.cuda.Event] | Exception] = queue.Queue(ahead)
            self._closed = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(first, last), daemon=True, name="prefetch")
            self._thread.start()

    def next(self) -> Batch:
        """The next batch, on the device (segments stay on the CPU, where the model reads them)."""
        if self._thread is None:
            batch = self._build(self._step)
            self._step += 1
            return batch.to(self._device)
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        batch, copied = item
        stream = torch.cuda.current_stream(self._device)
        copied.wait(stream)
        for tensor in batch:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)  # allocated on the copy stream: do not reuse its memory too early
        return batch

    def _work(self, first: int, last: int) -> None:
        try:
            if self._device.index is not None:  # a new thread uses cuda:0, which may belong to another process
                torch.cuda.set_device(self._device)
            for step in range(first, last):
                pinned = self._build(step).pinned()
                with torch.cuda.stream(self._copy_stream):
                    batch = pinned.to(self._device)
                    copied = torch.cuda.Event()
                    copied.record(self._copy_stream)
                if not self._put((batch, copied)):
                    return
        except Exception as err:
            self._put(err)

    def _put(self, item: tuple[Batch, torch.cuda.Event] | Exception) -> bool:
        """Queue an item; False if the context was left in the meantime."""
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
        # After a device failure, freeing the thread's pinned memory would abort the process.
        if self._thread is not None and not isinstance(error, torch.AcceleratorError):
            self._closed.set()
            self._thread.join()
