"""The campaign finds known faults, repeats its cases, and adds up. It is run by `make test WHAT=campaign`."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.campaign import errors, flips, fuzz, kills, lab, mutations, power_cut_model, processes, shim, verdicts
from tests.campaign.lab import Command, Lab, snapshot
from tests.campaign.processes import Outcome, Running

COPY = Command(("copy",), ("out.bin",))


class SmallLab(Lab):
    """A lab with one file, and a command that copies it: `work` is what the forked child does."""

    def __init__(self, base, work):
        self.work = work
        super().__init__(base, seed=1)

    def _build(self):
        self.pristine.mkdir()
        (self.pristine / "cache/pretrain/web/train").mkdir(parents=True)
        (self.pristine / "cache/pretrain/web/train/shard_00000.bin").write_bytes(bytes(range(256)))

    def start(self, command, **options):
        return super().start(command, work=self.work, **options)


def careless():
    data = Path("cache/pretrain/web/train/shard_00000.bin").read_bytes()
    Path("out.bin").write_bytes(data)


def careful():
    data = Path("cache/pretrain/web/train/shard_00000.bin").read_bytes()
    if data != bytes(range(256)):
        print("error: shard_00000.bin is damaged: build the cache again", file=sys.stderr)
        raise SystemExit(1)
    Path(".out.tmp").write_bytes(data)
    Path(".out.tmp").replace("out.bin")


def confused():
    raise KeyError("tokens")


@pytest.fixture
def one_command(monkeypatch):
    """Every command of the campaign is the copy of the small lab."""
    monkeypatch.setattr(lab, "COMMANDS", dict.fromkeys(lab.COMMANDS, COPY))
    for module in (flips, kills, errors):
        monkeypatch.setattr(module, "COMMANDS", dict.fromkeys(lab.COMMANDS, COPY))


@pytest.mark.parametrize(
    ("work", "result", "reason"),
    [(careless, "failed", "silent"), (careful, "noticed", "damaged"), (confused, "failed", "KeyError")],
)
def test_a_flipped_bit_is_judged(tmp_path, one_command, work, result, reason):
    small = SmallLab(tmp_path, careful)
    small.reference("verify")
    small._references = dict.fromkeys(lab.COMMANDS, small.reference("verify"))
    small.work = work
    verdict = flips.case(small, random.Random(3), 0)
    assert verdict.result == result
    assert reason in verdict.reason
    assert "shard_00000.bin" in verdict.case


def test_leftovers_and_wrong_results_after_a_kill_fail(tmp_path, one_command):
    small = SmallLab(tmp_path, careful)
    small.reference("build_web")
    small.reset("out.bin")
    assert small.recover("build_web", "case").result == "held"
    (small.folder / ".out.123.tmp").touch()
    assert "left over" in small.recover("build_web", "case").reason


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(1, "", "error: no such run: give another\n", 0.1, 0), ""),
        (Outcome(2, "", "Usage: niels-gpt\n\nError: No such option: --x\n", 0.1, 0), ""),
        (Outcome(0, "fine", "", 0.1, 0), ""),
        (Outcome(1, "", "", 0.1, 0), "unclear"),
        (Outcome(1, "", "error: \n", 0.1, 0), "unclear"),
        (Outcome(1, "", "Traceback (most recent call last):\nKeyError: 'x'\n", 0.1, 0), "traceback"),
        (Outcome(-7, "", "", 0.1, 0), "signal 7"),
        (Outcome(0, "", "", 0.1, 1 << 40), "memory"),
        (Outcome(-9, "", "", 90, 0, hung=True), "hang"),
    ],
)
def test_the_end_of_a_command_is_judged(outcome, reason):
    assert reason in verdicts.unclear(outcome)
    assert bool(reason) == bool(verdicts.unclear(outcome))


def test_a_forked_command_has_its_own_output_and_exit_code(tmp_path):
    def work():
        print("text", input())
        raise SystemExit(5)

    outcome = Running(work, tmp_path, tmp_path / "o", stdin=b"line\n").wait()
    assert (outcome.code, outcome.out, outcome.err) == (5, "text line\n", "")


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch):
    import time

    monkeypatch.setattr(processes, "TIMEOUT", 0.2)
    outcome = Running(lambda: time.sleep(30), tmp_path, tmp_path / "o").wait()
    assert (outcome.code, outcome.hung) == (-9, True)


def endless(writes):
    import time

    for number in range(600):
        if writes:
            Path("metrics.jsonl").write_text("line\n" * number, encoding="utf-8")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "writes", "result"),
    [(("train",), True, "held"), (("train",), False, "failed"), (("cache", "verify"), True, "failed")],
)
def test_a_training_that_makes_progress_is_no_hang(tmp_path, monkeypatch, words, writes, result):
    small = SmallLab(tmp_path, lambda: endless(writes))
    monkeypatch.setattr(fuzz, "INPUTS", (("", fuzz.BYTES, (words,), ()),))
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    monkeypatch.setattr(fuzz, "PROGRESS_SECONDS", 1.0)
    verdict = fuzz.case(small, random.Random(1), 0)
    assert verdict.result == result
    assert ("hang" in verdict.reason) == (result == "failed")


@pytest.mark.parametrize(
    ("printed", "result"), [("warning: attention and GELU run in torch", "noticed"), ("", "failed")]
)
def test_weights_without_a_compiled_kernel_differ_if_that_was_printed(tmp_path, monkeypatch, printed, result):
    def train(weights):
        Path("runs/new/checkpoints").mkdir(parents=True)
        Path("runs/new/checkpoints/best.pt").write_bytes(weights)

    command = Command(("train",), environment=(("KERNELS", "native"),))
    monkeypatch.setattr(lab, "COMMANDS", {"new_native": command})
    small = SmallLab(tmp_path, lambda: train(b"native"))
    small.reference("new_native")
    small.reset()
    small.work = lambda: train(b"torch")
    small.run(command)
    outcome = Outcome(0, "", printed + "\n", 0.1, 0)
    small.work = lambda: print(os.environ["KERNELS"])
    verdict = small.recover("new_native", "case", result="noticed", after=outcome)
    assert verdict.result == result, verdict.reason
    (small.folder / "runs/new/checkpoints/best.pt").unlink()
    assert "is missing" in small.recover("new_native", "case", after=outcome).reason


def test_a_file_that_vanishes_while_the_lab_is_listed(tmp_path, monkeypatch):
    for name in ("kept", ".a.1.2.tmp"):
        (tmp_path / name).write_bytes(b"x")
    read = Path.read_bytes

    def vanish(path):
        (tmp_path / ".a.1.2.tmp").unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    assert list(snapshot(tmp_path)) == ["kept"]


def test_a_damaged_file_that_the_repeated_build_lacks(tmp_path, one_command):
    small = SmallLab(tmp_path, careful)
    small.reset()
    assert flips._read(small, "verify", "cache/.web.partial/state.json", b"", "case").result == "harmless"


def test_times_are_not_compared(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens_per_s": 10.0}\n', encoding="utf-8")
    before = snapshot(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens_per_s": 99.0}\n', encoding="utf-8")
    assert snapshot(tmp_path) == before
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "tokens_per_s": 10.0}\n', encoding="utf-8")
    assert snapshot(tmp_path) != before


def test_mutations_are_functions_of_the_seed():
    text, value = "a: 1\nb: [2, 3]\n", {"a": [1, {"b": 2}]}
    for number in range(50):
        first, second = (random.Random(f"7/fuzz/{number}") for _ in range(2))
        assert mutations.mutate_text(text, first) == mutations.mutate_text(text, second)
        assert repr(mutations.mutate_json(value, first)) == repr(mutations.mutate_json(value, second))
        assert mutations.mutate_bytes(b"x" * 99, first) == mutations.mutate_bytes(b"x" * 99, second)
        assert mutations.mutate_words(("a", "b"), first, ("--x",)) == mutations.mutate_words(
            ("a", "b"), second, ("--x",)
        )


def test_tables_add_up(tmp_path):
    pairs = [("kills", "held"), ("kills", "failed"), ("flips", "noticed"), ("flips", "harmless")]
    counts = verdicts.count(pairs)
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"counts": counts}), encoding="utf-8")
    total = verdicts.add_tables([tmp_path / "a.json", tmp_path / "b.json"])
    assert total == {"kills": Counter(held=2, failed=2), "flips": Counter(noticed=2, harmless=2)}
    last = verdicts.table(total).splitlines()[-1].split()
    assert last == ["all", "8", "2", "2", "2", "2"]


# --- the shim: in a process of its own, which LD_PRELOAD needs -------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    built = shim.compile_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("needs a C compiler")
    return built


def under_shim(compiled, folder, code):
    """Run Python code under the shim, in a folder."""
    prepared = f"from pathlib import Path\nfrom tests.campaign import shim\nimport os\nfolder = Path({str(folder)!r})\n"
    environment = os.environ | {"LD_PRELOAD": str(compiled), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", prepared + code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_the_shim_fails_the_nth_call(compiled, tmp_path):
    code = """
shim.arm(folder, shim.Fault("open", 1, "fail", 28, counters=str(folder.parent / "counters")))
Path("a").touch()
try:
    Path("b").touch()
except OSError as err:
    print(err.errno)
Path("/dev/null").open().close()
Path("b").write_text("x", encoding="ascii")
print(shim.read_counters(folder.parent / "counters")["open"])
"""
    work = tmp_path / "work"
    work.mkdir()
    done = under_shim(compiled, work, code)
    assert done.stdout.split() == ["28", "3"], done.stderr
    assert (work / "b").read_text(encoding="ascii") == "x"


def test_a_power_cut_undoes_what_was_not_synced(compiled, tmp_path):
    work, before, log = (tmp_path / name for name in ("work", "before", "log"))
    for folder in (work, before, log):
        folder.mkdir()
    code = f"""
import subprocess
shim.arm(folder, shim.Fault("event", 10**6, "kill_after", log={str(log)!r}))
def write(name, text, sync):
    with open(name, "w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
write("safe.tmp", "whole", True)
os.rename("safe.tmp", "safe")
descriptor = os.open(".", os.O_RDONLY)
os.fsync(descriptor)
write("late.tmp", "words", False)
os.rename("late.tmp", "late")
"""
    done = under_shim(compiled, work, code)
    assert done.returncode == 0, done.stderr
    seen = set()
    for number in range(60):
        cut = tmp_path / "cut"
        subprocess.run(["rm", "-rf", cut], check=True)
        subprocess.run(["cp", "-r", work, cut], check=True)
        power_cut_model.apply_power_cut(work, before, log, random.Random(number))
        assert (work / "safe").read_text(encoding="ascii") == "whole"  # synced, renamed, folder synced
        if (work / "late").exists():
            seen.add((work / "late").read_bytes())
        else:
            seen.add("no name")
        subprocess.run(["rm", "-rf", work], check=True)
        cut.rename(work)
    assert {"no name", b"", b"words"} <= seen
    assert any(isinstance(state, bytes) and b"\0" in state for state in seen)


@pytest.mark.parametrize(("code", "err", "reported"), [(0, "", False), (0, "warning: x", True), (4, "", True)])
def test_an_exit_code_of_incomplete_work_is_a_report(code, err, reported):
    assert verdicts.reports_a_problem(Outcome(code, "the output", err, 0.0, 0)) == reported
