"""P(z) by offset in the frame, against one forward pass per offset."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niels_gpt.memorization import measure as measure_module
from niels_gpt.memorization.extraction import log_probabilities
from niels_gpt.memorization.measure import Document, frame_offsets, measure, position_map
from tests.memorization.models import SMALL, letters, some_ids, some_model


def test_rope_is_independent_of_the_offset() -> None:
    ids, starts = some_ids(60), np.arange(0, 40, 5)
    first, last = (
        log_probabilities(some_model(), ids, starts, window=12, prompt=5, offset=offset) for offset in (0, 37)
    )
    assert last == pytest.approx(first, abs=1e-4)
    assert position_map(some_model(), [Document("a", ids)], SMALL) is None


def test_map_of_learned_positions() -> None:
    model = some_model(positions="learned")
    documents = [Document("a", some_ids(60)), Document("b", some_ids(7, V=39), control=True)]
    found = position_map(model, documents, SMALL, offsets=4)
    assert found is not None
    assert found["offsets"] == [0, 12, 25, 37]  # to T - (window - 1)
    assert [(d["name"], d["control"]) for d in found["documents"]] == [("a", False), ("b", True)]
    for document, row in zip(documents, found["documents"], strict=True):
        [one] = measure(model, [document], letters(), SMALL)
        for offset, mean, mean_log in zip(found["offsets"], row["mean_p"], row["mean_log_p"], strict=True):
            values = []
            for row_ids, prompt in zip(one.rows, (one.cuts - one.starts).tolist(), strict=True):
                window = torch.from_numpy(row_ids.astype(np.int64))[None]
                where = torch.arange(offset, offset + len(row_ids) - 1)[None]
                with torch.no_grad():
                    logs = model(window[:, :-1], positions=where)[0].double().log_softmax(-1)
                values.append(sum(logs[i - 1, window[0, i]].item() for i in range(prompt, len(row_ids))))
            assert mean_log == pytest.approx(np.mean(values), abs=1e-4)
            assert mean == pytest.approx(np.mean(np.exp(values)), rel=1e-3)
    assert len({round(value, 3) for value in found["documents"][0]["mean_log_p"]}) == 4


def test_map_of_evenly_spaced_windows() -> None:
    model = some_model(positions="learned")
    found = position_map(model, [Document("a", some_ids(60))], SMALL, offsets=1, most_windows=3)
    assert found is not None and found["offsets"] == [0]
    expected = log_probabilities(model, some_ids(60), np.array([0, 24, 48]), window=12, prompt=5)
    assert found["documents"][0]["mean_log_p"] == pytest.approx([expected.mean()], abs=1e-4)


def test_best_offset_by_hand() -> None:
    """`most_windows` / 25 windows are tried at every offset, at least one."""
    model, ids = some_model(positions="learned"), some_ids(60)
    for most_windows, starts in ((24, [0]), (50, [0, 48])):
        found = position_map(model, [Document("a", ids)], SMALL, offsets=1, most_windows=most_windows)
        best = [
            log_probabilities(model, ids, np.array(starts), window=12, prompt=5, offset=offset).max()
            for offset in range(38)
        ]
        assert found is not None
        assert found["documents"][0]["best_offset"] == int(np.argmax(best))
        assert found["documents"][0]["best_p"] == pytest.approx(np.exp(max(best)), rel=1e-3)


def test_the_best_offset_may_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "log_probabilities", lambda *_, offset, **options: np.array([offset - 100.0]))
    found = position_map(some_model(positions="learned"), [Document("a", some_ids(60))], SMALL)
    assert found is not None and found["documents"][0]["best_offset"] == 48 - (12 - 1)


@pytest.mark.parametrize(
    ("T", "window", "number", "offsets"),
    [(48, 12, 1, [0]), (48, 12, 2, [0, 37]), (48, 12, 3, [0, 18, 37]), (12, 12, 9, [0, 1]), (11, 12, 9, [0])],
)
def test_evenly_spaced_offsets(T: int, window: int, number: int, offsets: list[int]) -> None:
    assert frame_offsets(T, window, number) == offsets
