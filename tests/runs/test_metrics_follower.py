"""Metrics of a growing file: equal to reading all of it, only new points, limited in number."""

import json
import math
import random

import pytest

from niels_gpt.runs.metrics import encode_line, read_metrics
from niels_gpt.runs.metrics_follower import LARGEST_STEP, MetricsFollower


def line(step, **fields):
    return {"step": step, "loss": 5.0 - step / 1000, "lr": 0.1 + step / 1e6, "tokens_per_s": 100.0 + step, **fields}


def write(path, lines, mode="ab"):
    with path.open(mode) as file:
        file.writelines(map(encode_line, lines))


def followed(path, **options):
    follower = MetricsFollower(path)
    follower.read()
    return follower.curves(**options)


class Receiver:
    """What the page does: drop the points from step `from` on, append the others."""

    def __init__(self, follower, most):
        self.follower, self.most = follower, most
        self.version, self.last, self.points, self.evals = "", -1, {}, {}

    def ask(self):
        self.follower.read()
        answer = json.loads(json.dumps(self.follower.curves(after=self.last, version=self.version, most=self.most)))
        received = len(answer["points"]["step"])
        for known, new in (
            (self.points, answer["points"]),
            *((self.evals.setdefault(n, {}), c) for n, c in answer["evals"].items()),
        ):
            kept = [i for i, step in enumerate(known.get("step", [])) if step < answer["from"]]
            for name, values in new.items():
                known[name] = [known.get(name, [])[i] for i in kept if i < len(known.get(name, []))] + values
        self.version, self.last = answer["version"], answer["last_step"]
        return received


def test_points_are_the_lines_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [line(i, **({"evals": {"val_a": 2.0 + i, "a/b": 1.0}} if i % 3 == 2 else {})) for i in range(10)]
    write(path, lines)
    found = followed(path)
    assert found["width"] == 1 and found["from"] == 0 and found["last_step"] == 9
    assert found["points"]["step"] == list(range(10))
    for name in ("loss", "lr", "tokens_per_s"):
        assert found["points"][name] == pytest.approx([m[name] for m in read_metrics(path).lines], rel=1e-5)
    assert found["evals"] == {"val_a": {"step": [2, 5, 8], "loss": [4.0, 7.0, 10.0]}}


def test_long_runs_are_averaged_over_a_power_of_two(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rng = random.Random(0)
    losses = [rng.random() for _ in range(1000)]
    write(path, [line(i) | {"loss": loss} for i, loss in enumerate(losses)])
    found = followed(path, most=100)
    assert found["width"] == 16
    groups = [losses[i : i + 16] for i in range(0, 1000, 16)]
    assert found["points"]["step"] == [min(i + 15, 999) for i in range(0, 1000, 16)]
    assert found["points"]["loss"] == pytest.approx([sum(g) / len(g) for g in groups], rel=1e-5)
    lrs = [line(step)["lr"] for step in found["points"]["step"]]
    assert found["points"]["lr"] == pytest.approx(lrs, rel=1e-5)
    assert found["points"]["low"] == pytest.approx([min(g) for g in groups], rel=1e-5)
    assert found["points"]["high"] == pytest.approx([max(g) for g in groups], rel=1e-5)


@pytest.mark.parametrize("most", [10, 50, 10_000])
def test_a_receiver_of_new_points_has_what_one_that_reads_all_has(tmp_path, most):
    path = tmp_path / "metrics.jsonl"
    rng = random.Random(most)
    receiver = Receiver(MetricsFollower(path), most)
    step = 0
    for _ in range(60):
        number = rng.randrange(12)
        more = [line(i, **({"evals": {"val_a": float(i)}} if i % 4 == 3 else {})) for i in range(step, step + number)]
        write(path, more)
        step += number
        receiver.ask()
        whole = followed(path, most=most)
        assert receiver.points == whole["points"] if step else not receiver.points["step"]
        assert receiver.evals == whole["evals"]
        assert len(receiver.points["step"]) <= most
    assert receiver.ask() <= 1  # nothing new: at most the point of the last step


def test_a_resumed_run_replaces_the_steps_that_run_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [line(i) for i in range(20)])
    receiver = Receiver(MetricsFollower(path), 1000)
    receiver.ask()
    again = [line(i) | {"loss": 9.0} for i in range(10, 25)]
    (tmp_path / "new").touch()
    write(tmp_path / "new", [line(i) for i in range(10)])
    (tmp_path / "new").replace(path)  # as RunFolder.keep_metrics_before does
    write(path, again)
    receiver.ask()
    assert receiver.points["step"] == list(range(25))
    assert receiver.points["loss"][10:] == [9.0] * 15
    write(path, [line(5)])  # appended without dropping the later ones
    receiver.ask()
    assert receiver.points["step"] == list(range(6))


def test_damaged_torn_and_strange_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = encode_line(line(3))
    strange = [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"step": -1, "loss": 1}',
        b'{"step": %d, "loss": 1}' % LARGEST_STEP,
    ]
    strange += [
        b'{"step": 1, "loss": "x"}',
        whole.strip()[:-3] + whole[-36:-1],
        b'{"step": 2, "loss": 1e999, "lr": NaN}',
    ]
    path.write_bytes(encode_line(line(0)) + b"\n".join(strange) + b"\n" + whole[:20])
    follower = MetricsFollower(path)
    follower.read()
    assert follower.curves()["points"] == {
        "step": [0, 2],
        "loss": [5.0, None],
        "lr": [0.1, None],
        "tokens_per_s": [100.0, None],
    }
    with path.open("ab") as file:  # the writer completes the line
        file.write(whole[20:])
    follower.read()
    assert follower.curves()["points"]["step"] == [0, 2, 3]


def test_a_number_too_large_for_a_float(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0, "loss": {10**400}}}\n', encoding="utf-8")
    assert followed(path)["points"]["loss"] == [None]


def test_no_file_an_empty_one_and_one_that_disappears(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    for content in (None, b"", b"\n"):
        if content is not None:
            path.write_bytes(content)
        follower.read()
        assert follower.curves()["points"]["step"] == [] and follower.last_step is None
    write(path, [line(0)], "wb")
    follower.read()
    version = follower.curves()["version"]
    path.unlink()
    follower.read()
    found = follower.curves(after=0, version=version)
    assert found["last_step"] is None and found["version"] != version and found["from"] == 0


def test_reading_again_costs_the_new_lines_only(tmp_path, monkeypatch):
    from niels_gpt.runs import metrics_follower

    path = tmp_path / "metrics.jsonl"
    write(path, [line(i) for i in range(100)])
    parsed = []
    real = metrics_follower.parse_line
    monkeypatch.setattr(metrics_follower, "parse_line", lambda text: parsed.append(text) or real(text))
    follower = MetricsFollower(path)
    follower.read()
    assert len(parsed) == 100
    follower.read()
    write(path, [line(100)])
    follower.read()
    assert len(parsed) == 101 and follower.last_step == 100
    assert math.isfinite(follower.curves()["points"]["loss"][-1])
