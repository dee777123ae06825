"""One update on a CPU, next to the same written out; and what the machine is told and asked."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from niels_gpt.config import EngineConfig, ModelConfig, RunConfig, TrainConfig
from niels_gpt.kernels.cpu import native
from niels_gpt.model.gpt import GPT
from niels_gpt.system import device as device_module
from niels_gpt.system.device import check_precision, peak_flops
from niels_gpt.training.memory_limits import OutOfMemory
from niels_gpt.training.optim.optimizer import make_optimizer, set_lr
from niels_gpt.training.step import StepRunner, deterministic
from niels_gpt.training.tasks.base import Batch
from niels_gpt.training.throughput import ThroughputMeter, flops_per_token

SIZES = {"V": 50, "T": 12, "C": 16, "L": 2, "H": 2, "dropout": 0.0}


def config_of(engine=None, **options):
    settings = {"B": 6, "total_steps": 50, "warmup_steps": 0, "clip_norm": 0.5, **options}
    return RunConfig(model=ModelConfig(**SIZES), train=TrainConfig(**settings), engine=EngineConfig(**(engine or {})))


def batch_of(step, masked=True):
    ids = torch.randint(50, (6, 13), generator=torch.Generator().manual_seed(step))
    targets = ids[:, 1:].clone()
    if masked:
        targets[:, :4] = -100
        targets[5] = -100  # a row with nothing to learn: its part has no targets at all
    return Batch(ids[:, :-1], targets)


def model_of():
    torch.manual_seed(3)
    return GPT(ModelConfig(**SIZES))


def run(config, steps=6, notes=None):
    model = model_of()
    engine = StepRunner(
        model,
        make_optimizer(model, config.train),
        config,
        "cpu",
        note=(lambda t: None) if notes is None else notes.append,
    )
    made = [engine.step(batch_of(step), step=step, lr=0.01 * (step + 1)) for step in range(steps)]
    return model, [(u.loss.item(), u.norm.item()) for u in made]


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 6])
def test_an_update_is_what_it_is_when_written_out(parts):
    model, found = run(config_of(accumulate=parts))
    reference = copy.deepcopy(model_of())
    decay = [p for p in reference.parameters() if p.dim() > 1]
    rest = [p for p in reference.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step, (loss, norm) in enumerate(found):
        batch = batch_of(step)
        scored = batch.targets != -100
        logits = reference(batch.x)[scored]
        expected = F.cross_entropy(logits, batch.targets[scored])
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
        assert (p - q).norm() < 0.005 * q.norm()  # where a gradient is nearly 0, Adam makes much of its rounding


def test_dropout_depends_on_seed_and_step_alone():
    config = RunConfig(model=ModelConfig(**{**SIZES, "dropout": 0.5}), train=TrainConfig(B=6))
    losses = []
    for before in (1, 99):
        torch.manual_seed(3)
        model = GPT(config.model)
        engine = StepRunner(model, make_optimizer(model, config.train), config, "cpu")
        torch.manual_seed(before)
        losses.append([engine.step(batch_of(0), step=step, lr=0.0).loss.item() for step in (4, 5, 4)])
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[0][2] != losses[0][1]


def test_a_compile_that_fails_costs_one_line(monkeypatch):
    def broken(function, **options):
        def call(*args, **kwargs):
            raise RuntimeError("\n  no compiler here\nand much more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    notes = []
    _, found = run(config_of({"compile": True}), notes=notes)
    assert found == run(config_of())[1]
    (note,) = notes
    assert "no compiler here" in note
    assert "\n" not in note


def test_a_compile_that_fails_in_the_backward_pass_costs_one_line(monkeypatch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no compiler for the way back")

    def half(function, **options):
        return lambda *args, **kwargs: Broken.apply(function(*args, **kwargs))

    monkeypatch.setattr(torch, "compile", half)
    notes = []
    _, found = run(config_of({"compile": True}, accumulate=2), notes=notes)
    assert found == run(config_of(accumulate=2))[1]
    assert len(notes) == 1
    assert "no compiler for the way back" in notes[0]


def test_an_error_after_a_compiled_update_is_no_failed_compile(monkeypatch):
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


def test_on_a_cpu_nothing_is_compiled_unless_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("compiled"))
    run(config_of(total_steps=100_000))


@pytest.mark.parametrize("again", [False, True])
def test_checkpointed_activations_learn_the_same(again):
    assert run(config_of({"checkpoint_activations": again}))[1] == run(config_of())[1]


# --- memory ------------------------------------------------------------------------------------------


def too_much(kind="torch"):
    """Ask for a pebibyte, which no allocator has."""
    torch.empty(2**50, dtype=torch.uint8) if kind == "torch" else np.empty(2**50, dtype=np.uint8)


@pytest.fixture
def room(monkeypatch):
    """Room for so many rows at once, from now on."""
    loss = GPT.loss

    def limit(rows):
        def limited(self, x, targets, **options):
            if len(x) > rows:
                too_much()
            return loss(self, x, targets, **options)

        monkeypatch.setattr(GPT, "loss", limited)

    return limit


def test_a_batch_that_does_not_fit_is_split_on_a_cpu_too(room):
    expected = run(config_of(accumulate=3))[1]
    room(2)
    notes = []
    assert run(config_of(), notes=notes)[1] == expected
    (note,) = notes
    assert "6 rows" in note
    assert "3 parts of 2" in note


def test_asked_for_parts_that_do_not_fit_are_refused_with_what_would(room):
    room(2)
    with pytest.raises(ValueError, match=r"cpu is out of memory .*3 rows of T=12 .*train\.accumulate=3 would fit"):
        run(config_of(accumulate=2))


def test_not_even_one_row(room):
    room(0)
    with pytest.raises(ValueError, match=r"not even one row of T=12 .* cpu \("):
        run(config_of())


def test_no_room_in_mid_run_leaves_the_weights(room):
    config = config_of()
    model = model_of()
    engine = StepRunner(model, make_optimizer(model, config.train), config, "cpu")
    engine.step(batch_of(0), step=0, lr=0.01)
    before = copy.deepcopy(model.state_dict())
    room(5)
    with pytest.raises(OutOfMemory, match="cpu is out of memory"):
        engine.step(batch_of(1), step=1, lr=0.01)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_no_room_for_what_the_optimizer_keeps(monkeypatch):
    """Smaller parts would not help: it is as large as the weights."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: too_much())
    with pytest.raises(ValueError, match=r"adamw keeps of [\d,]+ weights \(.*GiB\)") as err:
        run(config_of())
    assert not isinstance(err.value, OutOfMemory)


# --- arithmetic --------------------------------------------------------------------------------------


def test_tf32_is_for_cuda():
    with pytest.raises(ValueError, match="tf32"):
        check_precision("tf32", "cpu")
    with pytest.raises(ValueError, match="tf32"):
        run(config_of(precision="tf32"))
    for precision in ("fp32", "bf16"):
        check_precision(precision, "cpu")


def test_bf16_where_the_gpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    with pytest.raises(ValueError, match=r"Tesla V100 has no bfloat16.*fp32"):
        check_precision("bf16", "cuda")
    check_precision("fp32", "cuda")


@pytest.mark.parametrize(("precision", "has", "said"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)])
def test_bf16_where_the_processor_has_none(precision, has, said, monkeypatch):
    monkeypatch.setattr(device_module, "_onednn_has_bf16", lambda: has)
    notes = []
    run(config_of(precision=precision), steps=0, notes=notes)
    assert len(notes) == said
    assert all("no bfloat16" in note and "use fp32" in note and "\n" not in note for note in notes)


def test_kernels_that_could_not_be_compiled_are_mentioned_once(monkeypatch):
    notes = []
    run(config_of(), steps=2, notes=notes)
    assert notes == []
    monkeypatch.setattr(native, "_problems", {"attention": "attention.c: there is no C compiler here: install gcc"})
    run(config_of(), steps=2, notes=notes)
    (note,) = notes
    assert "slower" in note and "no C compiler" in note and "\n" not in note


def test_fp8_where_there_is_none(monkeypatch):
    with pytest.raises(ValueError, match=r"fp8: cpu has no FP8 products.*bf16"):
        run(config_of(precision="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"fp8: NVIDIA A100 has no FP8 products.*bf16"):
        check_precision("fp8", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(device_module, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"fp8 needs Triton.*bf16"):
        check_precision("fp8", "cuda")
    monkeypatch.setattr(device_module, "HAS_TRITON", True)
    check_precision("fp8", "cuda")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("Some New Thing", None),
    ],
)
def test_the_peak_of_a_device_is_the_longest_name_that_fits(name, peak, monkeypatch):
    monkeypatch.setattr(device_module.torch.cuda, "get_device_name", lambda device=None: name)
    assert peak_flops("cuda") == peak


def test_a_cpu_has_no_peak():
    assert peak_flops("cpu") is None


def test_flops_per_token():
    assert flops_per_token(ModelConfig(**SIZES), 1000) == 6 * 1000 + 12 * 2 * 16 * 12


def test_a_line_of_metrics(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("niels_gpt.training.throughput.time.perf_counter", lambda: now[0])
    meter = ThroughputMeter("cpu", flops=1)
    meter.begin()
    now[0] = 12.5
    meter.fed()
    (line,) = meter.end(7, 0.1, torch.tensor(1.5), torch.tensor(2.5), tokens=1000, supervised=torch.tensor(30))
    assert line == {
        "step": 7,
        "loss": 1.5,
        "lr": 0.1,
        "grad_norm": 2.5,
        "tokens_per_s": 400.0,
        "supervised_per_s": 12.0,
    }
    assert meter.drain() == []


def test_the_learning_rate_reaches_all_groups():
    for optimizer in ("adamw", "muon"):
        made = make_optimizer(model_of(), TrainConfig(optimizer=optimizer))
        set_lr(made, 0.25)
        assert [group["lr"] for group in made.param_groups] == [0.25] * len(made.param_groups)


def test_a_learning_rate_on_the_device_is_changed_in_place():
    weight = torch.nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.1)
    made = torch.optim.SGD([weight], lr=rate)
    set_lr(made, 0.5)
    assert made.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_determinism_on_a_cpu_needs_no_switch():
    with deterministic(True, "cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
