"""How much the report on a new model measures."""

from __future__ import annotations

import pytest

from niels_gpt.workflow.report_size import ReportSize, report_size


def metrics(tokens_per_s: float) -> list[dict[str, float]]:
    return [{"tokens_per_s": speed} for speed in (1.0, tokens_per_s, tokens_per_s, tokens_per_s, 1e12)]


def test_everything_on_a_fast_machine() -> None:
    size = report_size(600.0, metrics(1e7))
    assert size == ReportSize(size.held_out, 15_000_000) and size.held_out > 100_000


@pytest.mark.parametrize("speed", [1_000.0, 10_000.0])
@pytest.mark.parametrize("seconds", [30.0, 60.0, 600.0])
def test_the_report_takes_a_fifth_of_the_time(seconds: float, speed: float) -> None:
    """Tokens of all parts, at three times the speed of training; a minute at most."""
    size = report_size(seconds, metrics(speed))
    tokens = size.held_out + 6 * size.compared + 200 * size.questions + 50 * size.windows
    smallest = report_size(0.0, metrics(speed))
    least = smallest.held_out + 6 * smallest.compared + 200 * smallest.questions + 50 * smallest.windows
    assert tokens / (3 * speed) <= max(min(0.2 * seconds, 60.0), least / (3 * speed)) * 1.1


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        # 12 s at 3,000 tokens/s are 36,000 tokens: 9,000 for scores (a half held out, a tenth for each text that is
        # compared), 9,000 for questions of 200, 18,000 for windows of 50.
        (60.0, ReportSize(4500, 3_000_000, 900, 45, 360)),
        (0.0, ReportSize(1024, 65_536, 512, 4, 200)),
        (1e9, ReportSize(22500, 15_000_000, 4500, 50, 1800)),  # a minute, whatever the training took
    ],
)
def test_the_parts_of_the_report(seconds: float, size: ReportSize) -> None:
    assert report_size(seconds, metrics(1000.0)) == size


def test_there_is_always_a_report() -> None:
    for size in (report_size(12.0, []), report_size(-5.0, metrics(100.0))):
        assert min(size) > 0
