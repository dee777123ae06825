"""The plan to fine-tune a base: all weights or LoRA, the context, and the steps."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import ByteTokenizer
from niels_gpt.workflow import base_plan as module
from niels_gpt.workflow.base_plan import BasePlan, check_base, make_base_plan, open_base
from niels_gpt.workflow.plan import Plan, StepTimes, measure_steps
from tests import token_caches
from tests.pretrained.conftest import add_tokenizer, random_model, save

BASE = ModelConfig(V=404, T=64, C=32, L=2, H=4, n_kv_heads=2, norm="rmsnorm", mlp="swiglu", dropout=0.0)


def loaded(config: ModelConfig = BASE, *, subwords: bool = True) -> LoadedRun:
    tokenizer: Any = SimpleNamespace(vocab_size=404) if subwords else ByteTokenizer()
    return LoadedRun(GPT(config), 7, Path("runs/base/checkpoints/best.pt"), None, tokenizer)


def planned(run: LoadedRun | None = None, **changes: Any) -> BasePlan:
    options = {"note_bytes": 300_000, "held_out_bytes": 30_000, "seconds": 600.0, "device": "cpu"}
    options["measure"] = lambda plan, device: StepTimes(0.1, 0.2)
    return make_base_plan(run or loaded(), **{**options, **changes})


def test_the_model_is_that_of_the_base() -> None:
    plan = planned()
    config = config_from_dict({"init_from": plan.init_from, "model": plan.model(), "train": plan.train(100, 8)})
    assert config.model == BASE
    assert config.train.optimizer == "adamw"
    assert Path(config.init_from).is_absolute() and config.init_from.endswith("runs/base/checkpoints/best.pt")
    assert plan.parameters == sum(p.numel() for p in GPT(BASE).parameters())


def test_the_context_fits_the_base_and_the_notes() -> None:
    assert planned().size.T == 64
    assert planned(held_out_bytes=6 * 33).size.T == 32
    long = loaded(dataclasses.replace(BASE, T=4096))
    assert planned(long).size.T == 512
    learned = loaded(dataclasses.replace(BASE, positions="learned"))
    assert planned(learned).size.T == 64
    with pytest.raises(ValueError, match="390 bytes"):
        planned(learned, held_out_bytes=300)


def test_steps_follow_the_notes_and_the_time() -> None:
    passes = planned().pretrain_steps * 8 * 64 / (300_000 / 3.5)
    assert 4.5 < passes <= module.EPOCHS
    assert planned(seconds=100.0).pretrain_steps < planned().pretrain_steps
    assert planned(loaded(dataclasses.replace(BASE, V=256), subwords=False)).sft_steps == 0


def test_a_slow_machine_gets_fewer_rows() -> None:
    """The time of a step is proportional to its rows; 20 steps of both phases must fit into 0.4 of the time."""
    measured = []

    def measure(plan: Plan, device: str) -> StepTimes:
        measured.append((plan.pretrain_rows, plan.sft_rows))
        return StepTimes(0.1 * plan.pretrain_rows, 0.1 * plan.sft_rows / 6)

    plan = planned(seconds=60.0, measure=measure)
    assert measured == [(1, 6)]  # steps with all rows are not run
    assert (plan.pretrain_rows, plan.sft_rows) == (4, 24) and plan.seconds <= 24.0
    assert planned(seconds=6.0, measure=measure).pretrain_rows == 1
    measured.clear()
    assert planned(seconds=3000.0, measure=measure).pretrain_rows == 8
    assert measured == [(1, 6), (8, 48)]


def test_all_weights_if_they_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned().rank == 0
    weights = sum(p.numel() for p in GPT(BASE).parameters())
    monkeypatch.setattr(module, "machine_memory", lambda: 31 * weights)
    plan = planned()
    assert plan.rank == module.RANK
    assert plan.train(10, 8)["lora"] == {"rank": module.RANK}
    assert plan.train(10, 8)["base_lr"] > dataclasses.replace(plan, rank=0).train(10, 8)["base_lr"]
    assert planned(rank=0).rank == 0
    assert planned(rank=4).rank == 4


def test_wide_models_learn_more_slowly() -> None:
    plan = planned()
    wide = dataclasses.replace(plan, size=plan.size._replace(C=1280))
    assert wide.train(10, 8)["base_lr"] == pytest.approx(plan.train(10, 8)["base_lr"] / 10)


def test_the_speed_with_adapters_is_measured() -> None:
    plan = planned(rank=2)
    assert all(seconds > 0 for seconds in measure_steps(plan, "cpu", steps=1))
    assert isinstance(plan, Plan)


def test_what_can_be_a_base(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-run does not exist"):
        open_base("no-such-run", "cpu", tmp_path / "run")
    with pytest.raises(ValueError, match="no-such-model"):
        open_base("hf:no-such-model", "cpu", tmp_path / "run")
    for empty in ("", "hf:"):  # not the working directory
        with pytest.raises(ValueError, match="name"):
            open_base(empty, "cpu", tmp_path / "run")
    config = ModelConfig(C=16, L=1, H=2)
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "base.pt", GPT(config), None, 3, config)
    assert open_base(str(tmp_path / "base.pt"), "cpu", tmp_path / "run").step == 3


def test_a_base_without_a_tokenizer_is_refused_with_a_remedy_that_exists(tmp_path: Path) -> None:
    config = ModelConfig(V=404, C=16, L=1, H=2)
    torch.manual_seed(0)
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    run.write_config(dataclasses.replace(RunConfig(), model=config))
    save_checkpoint(run.best, GPT(config), None, 3, config)
    for named in (run.path, run.best):
        with pytest.raises(ValueError, match=r"404 tokens.*tokenizer\.model.*copy") as error:
            check_base(str(named), tmp_path / "base")
        assert "--tokenizer" not in str(error.value)
        shutil.copy(token_caches.folder() / "tokenizer/spm.model", run.tokenizer_path)
        check_base(str(named), tmp_path / "base")  # the remedy
        run.tokenizer_path.unlink()
    (tmp_path / "public").mkdir()
    write_hf(GPT(config), ByteTokenizer(), tmp_path / "public")
    for path in (tmp_path / "public").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"hf:.*public has no tokenizer.*tokenizer\.json"):
        check_base(f"hf:{tmp_path}/public", tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_base_whose_template_fails_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    folder = save(random_model("smollm2", vocab_size=400), tmp_path / "public")
    add_tokenizer(folder, 340)
    check_base(f"hf:{folder}", tmp_path / "base")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="cannot chat"):
        check_base(f"hf:{folder}", tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_the_import_of_an_earlier_try_is_used_only_for_the_same_model(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        write_hf(GPT(ModelConfig(T=16, C=16, L=1, H=2)), ByteTokenizer(), tmp_path / name)
    with pytest.raises(ValueError, match=f"hf:{tmp_path}/one"):
        open_base(f"{tmp_path}/one", "cpu", tmp_path / "base")
    first = open_base(f"hf:{tmp_path}/one", "cpu", tmp_path / "base")
    again = open_base(f"hf:{tmp_path}/one", "cpu", tmp_path / "base")
    assert torch.equal(first.model.tok_emb.weight, again.model.tok_emb.weight)
    with pytest.raises(ValueError, match=r"one.*two.*--run-dir"):
        open_base(f"hf:{tmp_path}/two", "cpu", tmp_path / "base")
