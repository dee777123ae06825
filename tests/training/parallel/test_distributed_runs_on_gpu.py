"""DDP and FSDP2 over NCCL, as far as one GPU goes: a group of one process, which must compute what no group does."""

import os
import socket
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
from tests.training import same
from tests.training.test_step_on_gpu import batch_of, close, config_of

pytestmark = pytest.mark.gpu
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def group():
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("needs CUDA and NCCL")
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setitem(os.environ, name, value)
        device = torch.device("cuda:0")
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=device)
        yield
        torch.distributed.destroy_process_group()


def run(config, spread):
    """(losses and norms, the model, the optimizer) after some updates."""
    torch.manual_seed(0)
    model = GPT(config.model)
    if spread is not shard_model:
        model.to("cuda:0")
    module = None if spread is None else spread(model, "cuda:0") if spread is shard_model else spread(model)
    optimizer = make_optimizer(model, config.train)
    engine = StepRunner(model, optimizer, config, "cuda:0", module=module, note=pytest.fail)
    made = [engine.step(batch_of(step), step=step, lr=1e-2 / (1 + step)) for step in range(STEPS)]
    return [(update.loss.item(), update.norm.item()) for update in made], model, optimizer


def gap(model, reference):
    """How far all weights are from the reference's, as a share of them."""
    ours, wanted = (torch.cat([weight.flatten() for weight in each.parameters()]) for each in (model, reference))
    return ((ours - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("spread", [replicate_model, shard_model])
def test_a_group_of_one_trains_as_no_group_does(spread, optimizer, precision, compiled, monkeypatch):
    # FSDP2's hooks cut what is compiled into other pieces; so must every operation round as plain code does, and not
    # only where a piece ends.
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", True)
    if precision == "fp32":  # Muon too: in bfloat16 the last bit of a gradient can become a 256th of an update
        monkeypatch.setattr(muon, "_dtype", lambda device: torch.float32)
    engine = {"graphs": False, "compile": compiled}
    config = config_of(engine=engine, optimizer=optimizer, accumulate=2, precision=precision)
    found, model, _ = run(config, spread)
    expected, plain, _ = run(config, None)
    whole = full_model(model)
    assert {weight.device.type for weight in whole.parameters()} == {"cuda"}
    exactly = precision == "fp32" or not compiled
    # Compiled in bfloat16 it may still round elsewhere, and where a gradient is near 0 AdamW makes whole steps of its
    # sign: so by the whole, not by elements.
    share = 0.05 if not exactly else 1e-4 if optimizer == "adamw" else 1e-3
    assert close(found, expected, share / 10)
    for name, weight in plain.state_dict().items():
        assert (whole.state_dict()[name] - weight).norm() < share * weight.norm(), name
    if not exactly:
        exact = run(replace(config, train=replace(config.train, precision="fp32")), None)[1]
        assert gap(whole, exact) < 1.25 * gap(plain, exact)  # and no farther from float32 than plain bfloat16 is


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_from_the_gpu(tmp_path):
    _, model, optimizer = run(config_of(engine={"graphs": False, "compile": False}), shard_model)
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        extra = {"best": None, "data": {}, "config": {}}
        folder.save_sharded(*sharded_content(TrainState(model, optimizer, step=STEPS), extra), SINGLE_PROCESS, keep=1)
    saved = read_checkpoint(folder.latest, "cpu")
    assert saved["config"] == to_dict(model.config)
    assert same(saved["model"], {name: weight.cpu() for name, weight in full_model(model).state_dict().items()})
    assert len(saved["optimizer"]["state"]) == len(list(model.parameters()))
