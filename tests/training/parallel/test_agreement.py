"""The processes of a run must have the same config and data, and a batch that they can share."""

import shutil

import pytest

from niels_gpt.system.processes import SINGLE_PROCESS, World
from niels_gpt.training.parallel.agreement import check_rows, check_same
from tests.training import sentence, small_config, worlds
from tests.training.worlds import run_world

QUICK = ["train.B=8", "train.total_steps=3", "output.checkpoint_every=100"]


def test_rows_must_be_divisible_by_the_processes(texts):
    config = small_config(texts, "train.B=6")
    for size in (1, 2, 3, 6):
        check_rows(config, World(size=size))
    with pytest.raises(ValueError, match=r"train\.B=6 .* 4 processes: .*train\.B=4 or 8.* 1, 2, 3, 6 processes"):
        check_rows(config, World(size=4))
    with pytest.raises(ValueError, match=r"train\.B=8,"):
        check_rows(config, World(size=8))


def test_a_single_process_agrees_with_itself(texts):
    check_same(small_config(texts), {"roam": "x"}, {"--resume": False}, SINGLE_PROCESS)


def test_processes_that_differ_are_rejected_and_the_main_one_reports_it(texts, tmp_path):
    """Paths of the data may differ between the processes; its content may not."""
    config = small_config(texts, *QUICK)
    for name in ("copy", "other"):
        shutil.copytree(texts, tmp_path / name)
    (tmp_path / "other/notes/note_03.md").write_text("# another note\n\n" + sentence(77, 80), encoding="utf-8")
    run, odd = [tmp_path / "run"] * 2, small_config(texts, *QUICK, "train.B=9")
    attempts = {
        "train.seed is 7 on rank 0 and 8 on rank 1": ((config, small_config(texts, *QUICK, "train.seed=8")), run),
        "output.eval_every is 3 on rank 0 and 2": ((config, small_config(texts, *QUICK, "output.eval_every=2")), run),
        "the data of roam is": ((config, small_config(tmp_path / "other", *QUICK)), run),
        "train.B=9": ((odd, odd), run),
        "--run-dir is": ((config, config), [tmp_path / "run-0", tmp_path / "run-1"]),
        "ok": ((config, small_config(tmp_path / "copy", *QUICK)), [tmp_path / "ok"] * 2),
    }
    first, second = run_world(2, worlds.try_all, list(attempts.values()))
    for message, outcome in zip(attempts, first, strict=True):
        assert message in outcome
    assert second == ["silent"] * 5 + ["ok"]
    assert not any(path.name.startswith("run") for path in tmp_path.iterdir())
