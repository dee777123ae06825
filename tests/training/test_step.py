"""One training step on a CPU beside a naive one: micro-batches, compilation, memory, precision."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from niels_gpt.config import EngineConfig, ModelConfig, RunConfig, TrainConfig
from niels_gpt.kernels.cpu import native
from niels_gpt.model.gpt import GPT
from niels_gpt.system import device as device_module
from niels_gpt.training import step as step_module
from niels_gpt.training.memory_limits import OutOfMemory
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.progress import WarningsOnly
from niels_gpt.training.step import StepRunner, deterministic, first_line
from niels_gpt.training.tasks.base import Batch

SIZES = {"V": 50, "T": 12, "C": 16, "L": 2, "H": 2, "dropout": 0.0}


def config_of(engine=None, **options):
    settings = {"B": 6, "total_steps": 50, "warmup_steps": 0, "clip_norm": 0.5, **options}
    return RunConfig(model=ModelConfig(**SIZES), train=TrainConfig(**settings), engine=EngineConfig(**(engine or {})))


def batch_of(step):
    ids = torch.randint(50, (6, 13), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].clone()
    targets[:, :4] = -100
    targets[5] = -100  # the micro-batch of this row may have no targets at all
    return Batch(ids[:, :-1], targets)


def model_of():
    torch.manual_seed(3)
    return GPT(ModelConfig(**SIZES))


def runner_of(config, note=lambda text: None):
    model = model_of()
    return StepRunner(model, make_optimizer(model, config.train), config, "cpu", note=note)


def run(config, steps=4, notes=None):
    """(model, [(loss, norm)]) after some steps."""
    runner = runner_of(config, **({} if notes is None else {"note": notes.append}))
    results = [runner.step(batch_of(step), step=step, lr=0.01 * (step + 1)) for step in range(steps)]
    return runner.model, [(result.loss.item(), result.norm.item()) for result in results]


@pytest.mark.parametrize("micro_batches", [0, 2, 6])
def test_a_step_equals_the_naive_one(micro_batches):
    model, results = run(config_of(accumulate=micro_batches))
    reference = copy.deepcopy(model_of())
    decayed = [p for p in reference.parameters() if p.dim() > 1]
    rest = [p for p in reference.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step, (loss, norm) in enumerate(results):
        batch = batch_of(step)
        scored = batch.targets != -100
        expected = F.cross_entropy(reference(batch.x)[scored], batch.targets[scored])
        optimizer.zero_grad()
        expected.backward()
        length = torch.sqrt(sum((p.grad**2).sum() for p in reference.parameters()))
        for p in reference.parameters():
            p.grad *= min(1.0, 0.5 / length.item())
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        assert norm == pytest.approx(length.item(), rel=1e-3)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p - q).norm() < 0.005 * q.norm()  # Adam amplifies the rounding of gradients near 0


def test_dropout_depends_on_seed_and_step_alone():
    config = RunConfig(model=ModelConfig(**{**SIZES, "dropout": 0.5}), train=TrainConfig(B=6))
    losses = []
    for seed in (1, 99):
        torch.manual_seed(3)
        model = GPT(config.model)
        runner = StepRunner(model, make_optimizer(model, config.train), config, "cpu")
        torch.manual_seed(seed)
        losses.append([runner.step(batch_of(0), step=step, lr=0.0).loss.item() for step in (4, 5, 4)])
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[0][2] != losses[0][1]


# --- compilation -------------------------------------------------------------------------------------


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("\n  no compiler here\nand much more")


def test_a_kernel_that_is_missing_is_one_warning_even_with_quiet(monkeypatch, capsys):
    monkeypatch.setattr(native, "_problems", {"gelu": "gelu.c: no C compiler found"})
    runner = runner_of(config_of(), note=WarningsOnly().note)
    for step in range(2):
        runner.step(batch_of(step), step=step, lr=0.01)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: attention and GELU run in torch") and "gelu.c: no C compiler found" in line


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_compilation_is_one_note(monkeypatch, where):
    def broken(function, **options):
        def call(*args, **kwargs):
            if where == "forward":
                raise RuntimeError("\n  no compiler here\nand much more")
            return BrokenBackward.apply(function(*args, **kwargs))

        return call

    monkeypatch.setattr(torch, "compile", broken)
    notes = []
    _, results = run(config_of({"compile": True}, accumulate=2), notes=notes)
    assert results == run(config_of(accumulate=2))[1]
    (note,) = notes
    assert note.startswith("warning: torch.compile") and "no compiler here" in note
    assert "\n" not in note


def test_an_error_after_a_compiled_step_is_not_a_failed_compilation(monkeypatch):
    calls = []

    def breaks_later(function, **options):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("something else")
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", breaks_later)
    with pytest.raises(RuntimeError, match="something else"):
        run(config_of({"compile": True}))


def test_a_model_is_compiled_once_and_not_for_segments(monkeypatch):
    compiled = []

    def spy(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", spy)
    runner = runner_of(config_of({"compile": True}))
    segments = torch.zeros(6, 12, dtype=torch.int64)
    runner.step(batch_of(0)._replace(segments=segments), step=0, lr=0.01)
    assert compiled == []
    for step in (1, 2):
        runner.step(batch_of(step), step=step, lr=0.01)
    assert compiled == [{"dynamic": False}]


def test_nothing_is_compiled_on_a_cpu_by_default(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    run(config_of(total_steps=100_000))
    assert compiled == []


def test_long_runs_on_cuda_are_compiled_and_captured_by_default():
    def choices(engine=None, **options):
        model = model_of()
        config = config_of(engine, precision="fp32", **options)
        runner = StepRunner(model, make_optimizer(model, config.train), config, "cuda")
        return runner._compile, runner._graphs

    assert step_module.GRAPH_WARM_UP == 3
    assert choices(total_steps=499) == (False, True)
    assert choices(total_steps=500) == (True, True)
    assert choices({"compile": True, "graphs": False}, total_steps=499) == (True, False)
    assert choices({"compile": False, "graphs": True}, total_steps=500) == (False, True)


def test_the_step_after_the_warm_up_is_captured_and_replayed(monkeypatch):
    """A stand-in for the graph: which batches it gets, and which it does not accept."""
    captured, replayed, accepts = [], [], step_module._Graph.accepts

    class Graph:
        def __init__(self, batch, step):
            captured.append(batch)

        def accepts(self, batch):
            return accepts(self, batch)

        def replay(self, batch):
            replayed.append(batch)
            return step_module.StepResult(torch.tensor(0.0), torch.tensor(0.0))

        @property
        def _batch(self):
            return captured[0]

    monkeypatch.setattr(step_module, "_Graph", Graph)
    runner = runner_of(config_of())
    runner._graphs = True
    batches = [batch_of(step) for step in range(5)]
    for step, batch in enumerate(batches):
        runner.step(batch, step=step, lr=0.01)
    assert captured == [batches[2]]
    assert replayed == batches[3:]
    smaller = Batch(batches[0].x[:3], batches[0].targets[:3])
    runner.step(smaller, step=5, lr=0.01)
    runner.step(batches[0]._replace(positions=torch.zeros(6, 12, dtype=torch.int64)), step=6, lr=0.01)
    assert replayed == batches[3:]


def test_checkpointed_activations_give_the_same_steps():
    assert run(config_of({"checkpoint_activations": True}))[1] == run(config_of())[1]


# --- memory ------------------------------------------------------------------------------------------


def too_much(kind="torch"):
    """Ask for a pebibyte, which no allocator has."""
    torch.empty(2**50, dtype=torch.uint8) if kind == "torch" else np.empty(2**50, dtype=np.uint8)


@pytest.fixture
def memory_for(monkeypatch):
    """A function that limits the memory to so many rows at once."""
    loss = GPT.loss

    def limit(rows):
        def limited(self, x, targets, **options):
            if len(x) > rows:
                too_much()
            return loss(self, x, targets, **options)

        monkeypatch.setattr(GPT, "loss", limited)

    return limit


def test_a_batch_that_does_not_fit_is_split(memory_for):
    expected = run(config_of(accumulate=3))[1]
    memory_for(2)
    notes = []
    assert run(config_of(), notes=notes)[1] == expected
    (note,) = notes
    assert "6 rows" in note
    assert "3 micro-batches of 2" in note


def test_an_error_names_the_number_of_micro_batches_that_fits(memory_for):
    memory_for(2)
    with pytest.raises(ValueError, match=r"cpu is out of memory .*GiB.* 3 rows of T=12 .*train\.accumulate=3 fits"):
        run(config_of(accumulate=2))


def test_not_even_one_row_fits(memory_for):
    memory_for(0)
    with pytest.raises(ValueError, match=r"one row of T=12 .* cpu \(.*engine\.checkpoint_activations"):
        run(config_of())


def test_out_of_memory_in_a_later_step_keeps_the_weights(memory_for):
    runner = runner_of(config_of(accumulate=3))
    runner.step(batch_of(0), step=0, lr=0.01)
    before = copy.deepcopy(runner.model.state_dict())
    memory_for(1)
    with pytest.raises(OutOfMemory, match=r"cpu is out of memory .* 2 rows of T=12"):
        runner.step(batch_of(1), step=1, lr=0.01)
    assert all(torch.equal(before[name], weight) for name, weight in runner.model.state_dict().items())
    assert all(p.grad is None for p in runner.model.parameters())


def test_no_memory_for_the_optimizer_state(monkeypatch):
    """Smaller micro-batches would not help."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: too_much())
    with pytest.raises(ValueError, match=r"adamw .*[\d,]+ weights \(.*GiB\)") as err:
        run(config_of())
    assert not isinstance(err.value, OutOfMemory)


# --- precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_precision_of_cuda_is_rejected_on_a_cpu(precision):
    with pytest.raises(ValueError, match=precision):
        run(config_of(precision=precision))


@pytest.mark.parametrize(("precision", "has", "notes"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)])
def test_emulated_bf16_is_noted(precision, has, notes, monkeypatch):
    monkeypatch.setattr(device_module, "_onednn_has_bf16", lambda: has)
    found = []
    run(config_of(precision=precision), steps=0, notes=found)
    assert len(found) == notes
    assert all("bfloat16" in note and "fp32" in note and "\n" not in note for note in found)


def test_missing_native_kernels_are_noted_once(monkeypatch):
    notes = []
    run(config_of(), steps=2, notes=notes)
    assert notes == []
    monkeypatch.setattr(native, "_problems", {"attention": "attention.c: there is no C compiler here: install gcc"})
    run(config_of(), steps=2, notes=notes)
    (note,) = notes
    assert "slower" in note and "no C compiler" in note and "\n" not in note


@pytest.mark.parametrize(("wanted", "device"), [(True, "cuda"), (False, "cuda"), (True, "cpu")])
def test_determinism_is_switched_on_for_cuda_and_restored(wanted, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")
    with deterministic(wanted, device):
        assert torch.are_deterministic_algorithms_enabled() == (wanted and device == "cuda")
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_first_line_of_an_error():
    assert first_line(RuntimeError("\n  first \nsecond")) == "first"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("x" * 300)) == "x" * 200
