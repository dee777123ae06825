"""Where a text is known, against a model that is asked at each place by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niels_gpt.memorization.extraction import log_probabilities
from niels_gpt.memorization.measure import Document, ExtractionSettings, measure
from niels_gpt.memorization.positions import at_every_position, position_map
from tests.memorization.models import letters, some_ids, some_model

SMALL = ExtractionSettings(window=12, prompt=5, stride=3, greedy=4)


def test_no_position_map_for_rope() -> None:
    assert position_map(some_model(), [Document("a", some_ids(60))], SMALL) is None


def test_rope_does_not_care_for_the_place() -> None:
    """Why there is none."""
    ids, starts = some_ids(60), np.arange(0, 40, 5)
    here, there = (
        log_probabilities(some_model(), ids, starts, window=12, prompt=5, offset=offset) for offset in (0, 37)
    )
    assert there == pytest.approx(here, abs=1e-4)


def test_learned_positions() -> None:
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
            for s in one.starts.tolist():
                window = torch.from_numpy(document.ids[s : s + one.window].astype(np.int64))[None]
                places = torch.arange(offset, offset + one.window - 1)[None]
                with torch.no_grad():
                    logs = model(window[:, :-1], positions=places)[0].double().log_softmax(-1)
                values.append(sum(logs[i - 1, window[0, i]].item() for i in range(one.prompt, one.window)))
            assert mean_log == pytest.approx(np.mean(values), abs=1e-4)
            assert mean == pytest.approx(np.mean(np.exp(values)), rel=1e-3)
    assert len({round(value, 3) for value in found["documents"][0]["mean_log_p"]}) == 4


def test_the_best_of_all_places() -> None:
    model = some_model(positions="learned")
    documents = [Document("a", some_ids(60)), Document("b", some_ids(7, V=39)), Document("c", some_ids(30))]
    told: list[tuple[int, int]] = []
    ones = measure(model, documents, letters(), SMALL)
    found = at_every_position(model, ones, progress=lambda done, total: told.append((done, total)))
    for document, one, best in zip(documents, ones, found, strict=True):
        each = [
            log_probabilities(model, document.ids, one.starts, window=one.window, prompt=one.prompt, offset=place)
            for place in range(48 - (one.window - 1) + 1)
        ]
        assert best.log_p == pytest.approx(np.max(each, axis=0), abs=1e-4)
        assert (best.log_p >= one.log_p - 1e-4).all()
        assert best.greedy_run.tolist() == one.greedy_run.tolist()
    assert told[-1][0] == told[-1][1] == sum(len(one.starts) * (48 - one.window + 2) for one in ones)
    places = position_map(model, documents, SMALL, offsets=2)
    assert places is not None
    for row, best in zip(places["documents"], found, strict=True):  # few windows: among them those that are looked at
        assert row["best_p"] <= np.exp(best.log_p.max()) * 1.001
        assert 0 <= row["best_offset"] <= 48 - (best.window - 1)
    assert places["documents"][1]["best_p"] == pytest.approx(np.exp(found[1].log_p.max()), rel=1e-3)  # its one window


def test_a_position_map_of_some_windows() -> None:
    model = some_model(positions="learned")
    found = position_map(model, [Document("a", some_ids(60))], SMALL, offsets=1, most_windows=3)
    assert found is not None and found["offsets"] == [0]
    expected = log_probabilities(model, some_ids(60), np.array([0, 24, 48]), window=12, prompt=5)
    assert found["documents"][0]["mean_log_p"] == pytest.approx([expected.mean()], abs=1e-4)


def test_places_beyond_the_frame() -> None:
    with pytest.raises(ValueError, match=r"11 positions from 38 on .* T=48"):
        log_probabilities(some_model(), some_ids(60), np.arange(3), window=12, prompt=5, offset=38)
