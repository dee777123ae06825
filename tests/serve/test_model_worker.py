"""The thread of a model ends whenever it is told to."""

import asyncio
import threading

import torch

from niels_gpt.serve.model_worker import leave_cores_to_workers
from tests.serve.conftest import cycle_model, served


class StopBeforeClear(threading.Event):
    """An event that a `stop` sets just before the thread clears it."""

    def __init__(self, worker):
        super().__init__()
        self._worker = worker

    def clear(self):
        self._worker._stopping = True
        self.set()
        super().clear()


def test_a_stop_between_two_rounds_ends_the_thread():
    worker = served("cycle", cycle_model()).worker
    worker._work = StopBeforeClear(worker)

    async def run():
        worker.start()
        await asyncio.to_thread(worker._thread.join, 60)
        return worker.alive

    assert asyncio.run(run()) is False


def test_cores_are_left_to_the_threads_of_models():
    before = torch.get_num_threads()
    seen = []
    try:
        torch.set_num_threads(3)
        assert leave_cores_to_workers() == 3
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert [torch.get_num_threads(), *seen] == [1, 1]
    finally:
        torch.set_num_threads(before)
