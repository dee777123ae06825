"""DDP and FSDP2 over NCCL on one GPU: a group of one process must compute the same as no group."""

import os
from dataclasses import replace

import pytest
import torch
import torch._inductor.config

from niels_gpt.config.yaml_file import to_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.processes import SINGLE_PROCESS
from niels_gpt.training.optim import muon
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.parallel.sharding import full_model, replicate_model, shard_model
from niels_gpt.training.resume import TrainState, sharded_content
from niels_gpt.training.step import StepRunner
from tests.ports import free_ports
from tests.training import same
from tests.training.test_step_on_gpu import batch_of, close, config_of

pytestmark = pytest.mark.gpu
STEPS = 6


@pytest.fixture(autouse=True)
def group(gpu_state):
    """A process group of this process alone, for one test."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}.items():
            patch.setitem(os.environ, name, value)
        device = torch.device("cuda:0")
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=device)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            torch.distributed.destroy_process_group()


def run(config, spread):
    """(losses and norms, the model, the optimizer) after some steps."""
    torch.manual_seed(0)
    model = GPT(config.model)
    if spread is not shard_model:
        model.to("cuda:0")
    module = None if spread is None else spread(model, "cuda:0") if spread is shard_model else spread(model)
    optimizer = make_optimizer(model, config.train)
    runner = StepRunner(model, optimizer, config, "cuda:0", module=module, note=pytest.fail)
    results = [runner.step(batch_of(step), step=step, lr=1e-2 / (1 + step)) for step in range(STEPS)]
    return [(result.loss.item(), result.norm.item()) for result in results], model, optimizer


def gap(model, reference):
    """The distance of all weights from the reference's, relative to their norm."""
    ours, wanted = (torch.cat([weight.flatten() for weight in each.parameters()]) for each in (model, reference))
    return ((ours - wanted).norm() / wanted.norm()).item()


@pytest.fixture
def eager_rounding():
    """Let every compiled operation round like eager code: FSDP2's hooks split the compiled graph elsewhere.

    torch's own patch, not monkeypatch: that one deletes the option afterwards, and torch 2.11 then fails to compile.
    """
    with torch._inductor.config.patch(emulate_precision_casts=True):
        yield


@pytest.mark.parametrize(
    ("optimizer", "precision", "compiled"),
    [("adamw", "fp32", True), ("adamw", "bf16", False), ("muon", "fp32", False), ("muon", "bf16", True)],
)
@pytest.mark.parametrize("spread", [replicate_model, shard_model])
@pytest.mark.usefixtures("eager_rounding")
def test_a_group_of_one_trains_like_no_group(spread, optimizer, precision, compiled, monkeypatch):
    if precision == "fp32":  # Muon too: in bfloat16 the last bit of a gradient can become 1/256 of a step
        monkeypatch.setattr(muon, "_dtype", lambda device: torch.float32)
    engine = {"graphs": False, "compile": compiled}
    config = config_of(engine=engine, optimizer=optimizer, accumulate=2, precision=precision)
    found, model, _ = run(config, spread)
    expected, plain, _ = run(config, None)
    full = full_model(model)
    assert {weight.device.type for weight in full.parameters()} == {"cuda"}
    exactly = precision == "fp32" or not compiled
    # Compiled bfloat16 may still round elsewhere, and AdamW turns the sign of a tiny gradient into a full step: so
    # compare norms, not elements.
    share = 0.05 if not exactly else 1e-4 if optimizer == "adamw" else 1e-3
    assert close(found, expected, share / 10)
    for name, weight in plain.state_dict().items():
        assert (full.state_dict()[name] - weight).norm() < share * weight.norm(), name
    if not exactly:
        exact = run(replace(config, train=replace(config.train, precision="fp32")), None)[1]
        assert gap(full, exact) < 1.25 * gap(plain, exact)  # no farther from float32 than plain bfloat16


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_from_the_gpu(tmp_path):
    _, model, optimizer = run(config_of(engine={"graphs": False, "compile": False}), shard_model)
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        extra = {"best": None, "data": {}, "config": {}}
        folder.save_sharded(*sharded_content(TrainState(model, optimizer, step=STEPS), extra), SINGLE_PROCESS, keep=1)
    saved = read_checkpoint(folder.latest, "cpu")
    assert saved["config"] == to_dict(model.config)
    assert same(saved["model"], {name: weight.cpu() for name, weight in full_model(model).state_dict().items()})
    assert len(saved["optimizer"]["state"]) == len(list(model.parameters()))
