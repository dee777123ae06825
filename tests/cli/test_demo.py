"""`niels-gpt demo`, with smaller models on a part of the embedded text."""

import dataclasses
import json
import re
import stat

import pytest

from niels_gpt.cli import demo
from niels_gpt.data import embedded
from niels_gpt.inference import questions
from niels_gpt.inference.generation import generate
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.loading import load_run
from niels_gpt.system.rng import generator
from niels_gpt.workflow import plan
from niels_gpt.workflow.plan import Plan, Size
from tests.cli import call, error_of
from tests.training import metric_lines, write_texts

VOCABULARY = 360


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch, tmp_path_factory):
    """A folder to work in, and plans and configs of small models."""
    monkeypatch.chdir(tmp_path)
    files, config_of = embedded.stdlib_files()[:60], demo.byte_demo_config

    def small_plan(*, steps, device):
        assert device == "cpu"
        return Plan(Size(16, 1, 2, 64), VOCABULARY + 4, steps // 2, steps - steps // 2, pretrain_rows=4, sft_rows=4)

    def small_config(**options):
        config = config_of(**options)
        model = dataclasses.replace(config.model, C=16, L=1, D=0)  # T as it is: the KV cache covers all tokens
        return dataclasses.replace(config, model=model, output=dataclasses.replace(config.output, eval_steps=1))

    monkeypatch.setattr(embedded, "stdlib_files", lambda: files)
    monkeypatch.setattr(plan, "demo_plan", small_plan)
    monkeypatch.setattr(demo, "byte_demo_config", small_config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def asked(tmp_path_factory, monkeypatch):
    """A few of the questions of the package; every answer of a small model is as long as it may be."""
    lines = embedded.QUESTIONS.read_text(encoding="utf-8").splitlines()[::20][:6]
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(questions, "QUESTIONS", path)
    return {json.loads(line)["question"] for line in lines}


@pytest.fixture
def texts(tmp_path):
    """Small files: texts/notes/*.md and texts/primer.txt."""
    write_texts(tmp_path / "texts")
    return ["--roam", "texts/notes", "--primer", "texts/primer.txt"]


def run_demo(*options):
    return call("demo", "--device", "cpu", *options)


def check_examination(output, asked):
    """The output tells how many answers are on topic, and shows some of the questions of the package."""
    number, total, percent = re.search(r"^answers on topic: (\d+) of (\d+) \((\d+)%\)", output, re.MULTILINE).groups()
    assert int(total) == len(asked)
    assert percent == f"{int(number) / len(asked):.0%}".rstrip("%")
    shown = re.findall(r"^you> +(.*)\nniels>", output, re.MULTILINE)
    assert len(shown) == len(set(shown)) == min(int(number), 3) + (int(number) < len(asked))
    assert set(shown) <= asked


def check_continuation(output, run, length):
    """The output has what the model of the run writes after the prompt, from a fixed seed; the console wraps lines."""
    loaded = load_run(run, None, "cpu")
    sampling = {"temperature": 0.7, "generator": generator(0, "demo"), "tokenizer": loaded.tokenizer}
    text = generate(loaded.model, demo.PROMPT, max_new_tokens=length, **sampling)
    assert "".join(filter(str.isalnum, text)) in "".join(filter(str.isalnum, output))


def check_next_commands(output, path):
    assert re.search(r"^Done in \d:\d\d\. ", output, re.MULTILINE)  # minutes at most
    commands = [line.partition("niels-gpt ")[2] for line in output.splitlines()[-3:]]
    assert commands == [f"chat {path}", f"eval {path} --questions", "notes ~/notes"]


# --- subwords ----------------------------------------------------------------------------------------


def test_the_demo_twice(tmp_path, capsys, texts, asked):
    for name in ("demo", "demo-2"):
        assert run_demo("--steps", 4, *texts) == 0
        output = capsys.readouterr().out
        words = " ".join(output.split())
        assert f"{VOCABULARY:,} subwords" in words and "2 steps on the notes, then 2 on dialogues" in words
        assert "11 notes to train on, 1 held out" in words
        assert re.search(r"^val_roam .* 8\.000 *$", output, re.MULTILINE)
        check_examination(output, asked)
        check_next_commands(output, f"runs/{name}")
        run = tmp_path / "runs" / name
        check_continuation(output, run / "pretrain", 100)
        for phase in ("pretrain", "sft"):
            assert len(metric_lines(run / phase)) == 2
            assert (run / phase / "loss.png").exists()
            model, _ = load_model(run / phase / "checkpoints/best.pt")
            assert (model.config.C, model.config.V) == (16, VOCABULARY + 4)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "texts"]
    assert call("eval", "runs/demo-2", "--questions", "--device", "cpu", "--json") == 0
    again = json.loads(capsys.readouterr().out)["answers"]
    assert f"answers on topic: {sum(row['on_topic'] for row in again)} of {len(asked)} " in output


def test_the_embedded_notes_and_the_dialogues_of_a_file(tmp_path, capsys, texts):
    """Also: the dialogues are not about the notes, there are variations, and nobody else can read the file."""
    assert run_demo("--steps", 2, *texts[2:], "--run-dir", "run") == 0
    notes = len(list(embedded.NOTES.rglob("*.md")))
    assert f"{notes - notes // 10} notes to train on, {notes // 10} held out" in capsys.readouterr().out
    path = tmp_path / "run/cache/dialogues.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    chats = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    answers = re.findall(r"^assistant: (.*)$", (tmp_path / "texts/primer.txt").read_text(encoding="utf-8"), re.M)
    assert len(answers) == 40
    assert {chat[-1]["content"] for chat in chats} == set(answers)
    assert len(chats) > len(answers)
    assert not (tmp_path / "run/cache/about_notes.jsonl").exists()


def test_the_name_of_a_folder_is_quoted(capsys, texts):
    assert run_demo("--steps", 2, *texts, "--run-dir", "it's mine") == 0
    assert "niels-gpt chat 'it'\"'\"'s mine'\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "resume"), [("config.yaml", "train 'my run' --resume"), ("sft/config.yaml", "pipeline 'my run' --resume")]
)
@pytest.mark.parametrize("options", [[], ["--bytes"]])
def test_a_folder_with_a_run_is_refused_with_the_command_that_resumes_it(tmp_path, capsys, made, resume, options):
    path = tmp_path / "my run" / made
    path.parent.mkdir(parents=True)
    path.write_text("", encoding="utf-8")
    assert run_demo("--run-dir", "my run", *options) == 1
    error = error_of(capsys)
    assert f"niels-gpt {resume}" in error and "--run-dir" in error
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize("options", [[], ["--bytes"]])
def test_notes_that_are_not_utf8(tmp_path, capsys, texts, options):
    """The remedy in the error is an option that the command has."""
    (tmp_path / "notes").mkdir()
    for number in range(2):
        (tmp_path / f"notes/{number}.md").write_bytes(b"caf\xe9 a word " * 200)
    command = ["--steps", 2, "--roam", "notes", *texts[2:], *options]
    assert run_demo(*command) == 1
    assert "--encoding-errors replace" in error_of(capsys)
    assert run_demo(*command, "--encoding-errors", "replace") == 0


def test_wiki_needs_bytes(tmp_path, capsys):
    assert run_demo("--wiki", "embedded") == 1
    assert "--bytes" in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_of_the_demo(monkeypatch):
    monkeypatch.undo()
    made = plan.demo_plan(steps=demo.STEPS, device="cpu")
    assert (made.pretrain_steps, made.sft_steps, made.dropout) == (104, 1046, 0.0)
    assert (made.size, made.vocab_size) == (plan.Size(128, 2, 4, 256), plan.VOCABULARY + 4)
    shortest = plan.demo_plan(steps=2, device="cpu")
    assert (shortest.pretrain_steps, shortest.sft_steps) == (1, 1)


# --- bytes -------------------------------------------------------------------------------------------


def test_the_demo_over_bytes_twice(tmp_path, capsys, texts, asked):
    froms = {r"wiki \(Python docstrings\)": "embedded", "roam": "embedded", "primer": "p.txt"}
    (tmp_path / "texts/primer.txt").rename("p.txt")  # a short name: the table has 80 columns
    for name, state in (("demo", "built"), ("demo-2", "cached")):
        assert run_demo("--bytes", "--steps", 3, "--primer", "p.txt") == 0
        output = capsys.readouterr().out
        for source, path in froms.items():
            assert re.search(rf"^{source} .* {path} \({state}\)", output, re.MULTILINE)
        assert "step 3/3" in output
        for held_out in (r"val_wiki \(Python docstrings\)", "val_roam", "val_chat"):
            assert re.search(rf"^{held_out} .* 8\.000 *$", output, re.MULTILINE)
        check_examination(output, asked)
        check_next_commands(output, f"runs/{name}")
        run = tmp_path / "runs" / name
        check_continuation(output, run, 300)
        assert len(metric_lines(run)) == 3
        assert (run / "loss.png").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["demo", "demo-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.txt", "runs", "texts"]


def test_the_config_of_the_demo_over_bytes(monkeypatch):
    monkeypatch.undo()
    config = demo.byte_demo_config()
    assert (config.train.total_steps, config.train.warmup_steps, config.train.optimizer) == (1600, 50, "muon")
    assert (config.model.T, config.model.D, config.train.B) == (256, 64, 8)
    assert GPT(config.model).num_parameters() == pytest.approx(3.2e6 / 4, rel=0.05)
    assert [demo.byte_demo_config(steps=steps).train.warmup_steps for steps in (1, 50, 51, 52)] == [0, 49, 50, 50]
    assert demo.byte_demo_config(precision="bf16").train.precision == "bf16"
