"""Scores of rows against a forward pass per row."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.evaluation.scoring import row_groups, score_rows, token_scores
from tests.memorization.models import chain_model, some_ids, some_model


@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.integers(2, 30), st.integers(1, 29)), min_size=1, max_size=8), batch=st.integers(0, 4)
)
def test_rows_of_any_lengths_share_a_batch(rows: list[tuple[int, int]], batch: int) -> None:
    texts = [some_ids(length, seed=i) for i, (length, _) in enumerate(rows)]
    prompts = np.array([min(prompt, length - 1) for length, prompt in rows])
    log_p, hits = score_rows(some_model(), texts, prompts, batch=batch)
    assert log_p.dtype == np.float64
    for i, (text, prompt) in enumerate(zip(texts, prompts.tolist(), strict=True)):
        ids = torch.from_numpy(text[None].astype(np.int64))
        with torch.no_grad():
            logits = some_model()(ids[:, :-1])[0, prompt - 1 :].double()
        targets = ids[0, prompt:]
        expected = logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
        assert log_p[i] == pytest.approx(expected, abs=1e-4)
        equal = [*(logits.argmax(-1) == targets).tolist(), False]
        assert hits[i] == equal.index(False)


def test_hits_end_at_the_first_miss() -> None:
    """The chain model continues i with i + 1."""
    rows = [np.array([3, 4, 5, 6]), np.array([3, 4, 9, 10]), np.array([7, 3, 4, 5])]
    assert score_rows(chain_model(), rows, np.array([1, 1, 1]))[1].tolist() == [3, 1, 0]
    assert score_rows(chain_model(), rows, np.array([3, 3, 2]))[1].tolist() == [1, 1, 2]


def test_offset_is_the_position_of_the_first_token() -> None:
    model, row = some_model(positions="learned"), some_ids(12)
    for offset in (0, 1, 37):
        positions = torch.arange(offset, offset + 11)[None]
        ids = torch.from_numpy(row[None].astype(np.int64))
        with torch.no_grad():
            logs = model(ids[:, :-1], positions=positions)[0].double().log_softmax(-1)
        expected = sum(logs[i - 1, ids[0, i]].item() for i in range(5, 12))
        assert score_rows(model, [row], np.array([5]), offset=offset)[0] == pytest.approx([expected], abs=1e-4)
    for offset in (38, -1):
        with pytest.raises(ValueError, match=rf"11 .*{offset}.*T=48"):
            score_rows(model, [row], np.array([5]), offset=offset)


def head_rows(monkeypatch: pytest.MonkeyPatch, fewest: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(rows of each call of the head, log P, hits) of 108 scored positions."""
    rows, seen = [some_ids(20, seed=i) for i in range(9)], []
    hook = some_model().lm_head.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    monkeypatch.setattr("niels_gpt.evaluation.scoring.FEWEST_ROWS", fewest)
    monkeypatch.setattr("niels_gpt.evaluation.scoring.LOGITS_BYTES", 4 * 40 * 5)
    try:
        log_p, hits = score_rows(some_model(), rows, np.full(9, 8))
    finally:
        hook.remove()
    return seen, log_p, hits


def test_chunks_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score_rows(some_model(), [some_ids(20, seed=i) for i in range(9)], np.full(9, 8))
    for fewest, sizes in ((1, [5] * 21 + [3]), (50, [50, 50, 8])):
        seen, log_p, hits = head_rows(monkeypatch, fewest)
        assert seen == sizes
        assert log_p == pytest.approx(expected[0], abs=1e-4) and hits.tolist() == expected[1].tolist()


def test_one_forward_pass_per_batch_and_the_head_for_scored_positions() -> None:
    model, seen, passes, counts = some_model(), [], [], []
    hooks = [
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel())),
        model.blocks.get_submodule("0").register_forward_hook(
            lambda module, args, output: passes.append((*args[0].shape[:-1], output.requires_grad))
        ),
    ]
    try:
        score_rows(model, [some_ids(12, seed=i) for i in range(20)], np.full(20, 5), batch=8, count=counts.append)
    finally:
        for hook in hooks:
            hook.remove()
    assert passes == [(8, 11, False), (8, 11, False), (4, 11, False)]
    assert sum(seen) == 20 * (12 - 5)
    assert counts == [8, 8, 4]


def test_groups_are_the_widest_rows_first() -> None:
    widths = np.array([5, 4096, 9, 2000, 5, 1365])
    groups = [group.tolist() for group in row_groups(some_model(), widths, 0)]
    assert groups == [[1], [3, 5], [2, 0, 4]]  # 4096 tokens per forward pass on a CPU
    assert [group.tolist() for group in row_groups(some_model(), widths, 4)] == [[1, 3, 5, 2], [0, 4]]
    assert [group.tolist() for group in row_groups(some_model(), np.array([9000, 0]), 0)] == [[0], [1]]


def test_no_rows() -> None:
    log_p, hits = score_rows(some_model(), [], np.zeros(0, dtype=int))
    assert len(log_p) == len(hits) == 0


def test_nan_weights_raise() -> None:
    model = copy.deepcopy(some_model())
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match=r"3 of 3 .*checkpoint"):
        score_rows(model, [some_ids(10, seed=i) for i in range(3)], np.full(3, 5))


def test_token_scores_of_bfloat16_logits_are_float32() -> None:
    model = copy.deepcopy(some_model()).to(torch.bfloat16)
    x = torch.from_numpy(some_ids(9).astype(np.int64))[None]
    targets = torch.full_like(x, -100)
    targets[0, 3], targets[0, 7] = 1, 2
    with torch.no_grad():
        log_p, greedy = token_scores(model, x, targets)
        logits = model(x)[0].float()
    assert (log_p.dtype, greedy.dtype, len(log_p)) == (torch.float32, torch.bool, 2)
    expected = logits.log_softmax(-1)[[3, 7], [1, 2]]
    assert log_p.tolist() == pytest.approx(expected.tolist(), abs=0.05)


PEAK = """
import resource, torch
from niels_gpt.evaluation.scoring import token_scores
from niels_gpt.model.gpt import GPT
from niels_gpt.system.host_limits import keep_freed_memory
keep_freed_memory()
model = GPT({"V": 50_000, "T": 512, "C": 16, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"}).eval()
def peak(rows):
    with torch.no_grad():
        token_scores(model, torch.zeros(rows, 512, dtype=torch.int64), torch.ones(rows, 512, dtype=torch.int64))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak(6), peak(24))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_four_times_the_rows_take_no_more_memory() -> None:
    """The logits of all rows would take 2.4 GB, those of a chunk 51 MB; glibc wastes a few chunks."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300)
    few, many = map(int, done.stdout.split())
    assert many - few < 500e6
