"""`niels-gpt demo`, with a smaller model on a part of the embedded text."""

import dataclasses
import re

import pytest

from niels_gpt.cli import demo
from niels_gpt.data import embedded
from niels_gpt.model.gpt import GPT
from tests.cli import call, error_of
from tests.training import metric_lines


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path)
    files, config_of = embedded.stdlib_files()[:60], demo.demo_config

    def small_config(**options):
        config = config_of(**options)
        model = dataclasses.replace(config.model, C=16, L=1, D=0)  # T as it is: the KV cache covers all tokens
        return dataclasses.replace(config, model=model, output=dataclasses.replace(config.output, eval_steps=1))

    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)
    monkeypatch.setattr(demo, "demo_config", small_config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_the_demo_twice(tmp_path, capsys):
    for name, state in (("demo", "built"), ("demo-2", "cached")):
        assert call("demo", "--steps", 3) == 0
        output = capsys.readouterr().out
        for source in (r"wiki \(Python docstrings\)", "roam", "primer"):
            assert re.search(rf"^{source} .*embedded \({state}\)", output, re.MULTILINE)
        assert "step 3/3" in output
        for held_out in (r"val_wiki \(Python docstrings\)", "val_roam", "val_chat"):
            assert re.search(rf"^{held_out} .* 8\.000 *$", output, re.MULTILINE)
        assert "# Notes on " in output
        assert re.search(r"^you> +what is niels\?$", output, re.MULTILINE)
        assert re.search(r"^niels> ", output, re.MULTILINE)
        assert re.search(r"^Done in \d:\d\d\. ", output, re.MULTILINE)  # minutes at most
        assert f"niels-gpt chat runs/{name}\n" in output
        assert f"niels-gpt batch show runs/{name} " in output
        run = tmp_path / "runs" / name
        assert len(metric_lines(run)) == 3
        assert (run / "loss.png").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_own_notes_in_an_own_folder(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    for i in range(10):
        (tmp_path / "notes" / f"{i}.md").write_text(f"note {i} says something. " * 20, encoding="utf-8")
    assert call("demo", "--steps", 1, "--roam", "notes", "--run-dir", "it's mine") == 0
    output = capsys.readouterr().out
    assert re.search(r"^roam .* notes \(built\)", output, re.MULTILINE)
    assert "niels-gpt chat 'it'\"'\"'s mine'\n" in output


def test_a_folder_with_a_run_is_refused_with_the_command_that_resumes_it(tmp_path, capsys):
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run/config.yaml").write_text("", encoding="utf-8")
    assert call("demo", "--run-dir", "my run") == 1
    assert "niels-gpt train 'my run' --resume, or choose another --run-dir" in error_of(capsys)


def test_notes_that_are_not_utf8(tmp_path, capsys):
    """The remedy in the error is an option that the command has."""
    (tmp_path / "notes").mkdir()
    for number in range(2):
        (tmp_path / f"notes/{number}.md").write_bytes("caf\xe9 ".encode("latin-1") * 200)
    command = ["demo", "--steps", 1, "--roam", "notes"]
    assert call(*command) == 1
    assert "--encoding-errors replace" in error_of(capsys)
    assert call(*command, "--encoding-errors", "replace") == 0


def test_the_config_of_the_demo(monkeypatch):
    monkeypatch.undo()
    config = demo.demo_config()
    assert (config.train.total_steps, config.train.warmup_steps, config.train.optimizer) == (1600, 50, "muon")
    assert (config.model.T, config.model.D, config.train.B) == (256, 64, 8)
    assert GPT(config.model).num_parameters() == pytest.approx(3.2e6 / 4, rel=0.05)
    assert [demo.demo_config(steps=steps).train.warmup_steps for steps in (1, 50, 51, 52)] == [0, 49, 50, 50]
    assert demo.demo_config(precision="bf16").train.precision == "bf16"
