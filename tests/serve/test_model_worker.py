"""The thread of a model ends whenever it is told to."""

import asyncio
import threading

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
