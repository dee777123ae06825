"""How many threads compute the steps of a model on a CPU: all cores, or fewer while something else needs them.

The threads of a matmul wait for each other many times in a step. If another program is busy, or the event loop, one of
them waits for a core meanwhile: on two cores, steps with two threads took 20 times as long as with one. On an idle
machine they take 0.6 of the time. So these numbers are measured, again and again, and the fastest one is used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

_FIRST_TRIAL = 0.05
"""Seconds until a slower number is tried again; four times as long whenever it is slower again."""
_LAST_TRIAL = 30.0
_TRIAL_STEPS = 10
"""Single steps vary: the event loop takes a core in some of them."""
_WEIGHT = 0.05
"""Of a step in the mean."""
_SLOWER = 1.5
"""Another number is tried at once if the mean has grown by this factor."""
_CLEARLY_SLOWER = 1.3
"""A trial ends early, after _FEWEST steps, if their mean is longer by this factor."""
_FEWEST = 3
_LONG = 64
"""Tokens to read; such steps begin with all cores. Their matmuls are long, so their threads wait rarely."""
_MANY = 8
"""Tokens to decode; such steps begin with all cores, too."""


class _Choice:
    """The fastest of some numbers of threads, for steps of about the same size."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = deque(numbers)  # the first is the fastest, the second is tried next
        self._steps = 0  # that the mean is of
        self._mean = 0.0  # seconds of a step with the first
        self._expected = 0.0  # the mean after the last trial
        self._trial: list[float] | None = None  # seconds of the steps with the second
        self._wait = _FIRST_TRIAL
        self._next_trial = 0.0

    def number(self, now: float) -> int:
        """The number for the next step."""
        known = self._steps >= _TRIAL_STEPS and len(self._numbers) > 1
        if self._trial is None and known and now >= self._next_trial:
            self._trial = []
        return self._numbers[0 if self._trial is None else 1]

    def add(self, seconds: float, now: float) -> None:
        """Add the time of a step with the last `number`."""
        if self._trial is None:
            self._steps += 1
            self._mean += max(_WEIGHT, 1 / self._steps) * (seconds - self._mean)
            if self._steps == _TRIAL_STEPS:
                self._expected = self._mean
            if self._mean > _SLOWER * self._expected > 0:  # something else needs the cores now
                self._next_trial = now
            return
        self._trial.append(seconds)
        steps, total = len(self._trial), sum(self._trial)
        lost = total > _TRIAL_STEPS * self._mean or (steps >= _FEWEST and total > _CLEARLY_SLOWER * steps * self._mean)
        if not lost and len(self._trial) < _TRIAL_STEPS:
            return
        tried = self._numbers[1]
        del self._numbers[1]
        if lost:
            self._numbers.append(tried)
            self._wait = min(4 * self._wait, _LAST_TRIAL)
        else:
            self._numbers.appendleft(tried)
            self._steps, self._mean = _TRIAL_STEPS, sum(self._trial) / _TRIAL_STEPS
            self._wait = _FIRST_TRIAL
        self._trial = None
        self._expected = self._mean
        self._next_trial = now + self._wait


class ThreadCount:
    """Sets the number of threads before each step of a model. Used by the thread that computes the steps."""

    def __init__(
        self, most: int, set_number: Callable[[int], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """most: the number of cores. set_number: `torch.set_num_threads`, which is for the calling thread."""
        self._most = most
        self._set_number = set_number
        self._clock = clock
        self._number = 0
        self._choices: dict[tuple[bool, int], _Choice] = {}
        self._choice: _Choice | None = None

    def choose(self, read: int, decoded: int) -> None:
        """Set the number for the next step, which reads and decodes about this many tokens."""
        number = self._most
        if self._most > 1:
            kind = (read > 0, (read or decoded).bit_length())
            if kind not in self._choices:
                many = read >= _LONG or (not read and decoded >= _MANY)
                self._choices[kind] = _Choice(sorted({self._most, self._most - 1, 1}, reverse=many))
            self._choice = self._choices[kind]
            number = self._choice.number(self._clock())
        if number != self._number:
            self._set_number(number)
            self._number = number

    def add(self, seconds: float) -> None:
        """Add the time of the step that was computed since `choose`."""
        if self._choice is not None:
            self._choice.add(seconds, self._clock())
