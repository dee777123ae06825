"""The number of threads follows the measured times."""

import pytest

from niels_gpt.serve.thread_count import ThreadCount


class Machine:
    """A machine with a clock, on which a step with n threads takes `seconds[n]`."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0
        self.number = 0
        self.used = []

    def count(self, most):
        return ThreadCount(most, self.set_number, lambda: self.now)

    def set_number(self, number):
        self.number = number

    def step(self, count, read=0, decoded=32):
        count.choose(read, decoded)
        self.used.append(self.number)
        self.now += self.seconds[self.number]
        count.add(self.seconds[self.number])

    def run(self, count, seconds, **options):
        """Steps for so many seconds; the share of the time with each number of threads."""
        began, self.used = self.now, []
        while self.now < began + seconds:
            self.step(count, **options)
        times = {number: self.seconds[number] * self.used.count(number) for number in self.used}
        return {number: time / sum(times.values()) for number, time in times.items()}


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 0.012, 2: 0.0075}, 2),
        ({1: 0.012, 2: 0.013}, 1),
        ({1: 0.012, 7: 0.002, 8: 0.05}, 7),
        ({1: 0.012, 7: 0.003, 8: 0.002}, 8),
    ],
)
@pytest.mark.parametrize("read", [0, 300])
def test_the_fastest_number_is_found_and_mostly_used(seconds, best, read):
    machine = Machine(seconds)
    count = machine.count(max(seconds))
    machine.run(count, 5, read=read)
    assert machine.run(count, 20, read=read)[best] > 0.9


def test_it_changes_at_once_when_another_program_starts_and_back_when_that_ends():
    machine = Machine({1: 0.012, 2: 0.0075})
    count = machine.count(2)
    machine.run(count, 100)
    machine.seconds = {1: 0.014, 2: 0.18}  # beside a busy program
    machine.run(count, 2)
    assert machine.used.count(2) <= 5  # seen at once, then single trials
    assert machine.used[-1] == 1
    machine.run(count, 100)
    machine.seconds = {1: 0.012, 2: 0.0075}
    machine.run(count, 35)  # the longest time between trials
    assert machine.run(count, 10)[2] > 0.9


def test_steps_of_different_sizes_and_kinds_have_their_own_number():
    machine = Machine({1: 0.001, 2: 0.002})
    count = machine.count(2)
    for _ in range(3000):
        machine.seconds = {1: 0.001, 2: 0.002}
        machine.step(count, decoded=1)
        machine.seconds = {1: 0.02, 2: 0.012}
        machine.step(count, decoded=32)
        machine.seconds = {1: 0.03, 2: 0.04}
        machine.step(count, read=32)
    assert [machine.used[-first::3] for first in (300, 299, 298)] == [[1] * 100, [2] * 100, [1] * 100]


def test_a_machine_with_one_core_is_not_measured():
    machine = Machine({1: 0.01})
    assert machine.run(machine.count(1), 1) == {1: 1.0}
