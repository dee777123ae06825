"""From a folder with a tokenizer of others to caches, a model, a chat and an audit, by the commands."""

import json
import re
import shlex

import pytest

from niels_gpt.runs.loading import load_run
from niels_gpt.tokenizer import load_tokenizer
from tests import chat_templates as templates
from tests import foreign_tokenizers as made
from tests.cli import call, typed

CONFIG = """
task: {task}
data:
  roam: notes
  token_cache: cache
  sources:
    talk: {{path: talk.jsonl, kind: chat}}
model: {{preset: v1, V: {V}, T: 64, C: 16, L: 1, H: 2, n_kv_heads: 1}}
train: {{total_steps: 3, warmup_steps: 1, B: 2, p_train: {{{name}: 1.0}}, p_val: {{{name}: 1.0}}}}
output: {{eval_every: 3, eval_steps: 1, checkpoint_every: 3, sample_tokens: 4}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with notes, conversations and a tokenizer; cache/ is built with it."""
    folder = tmp_path_factory.mktemp("foreign")
    made.make("llama2", folder / "theirs", chat_template=templates.LLAMA2)
    (folder / "notes").mkdir()
    for number, text in enumerate(made.TEXTS * 3):
        (folder / "notes" / f"{number}.md").write_text(f"# Note {number}\n<s>{text}</s>\n", encoding="utf-8")
    with (folder / "talk.jsonl").open("w", encoding="utf-8") as file:
        for number in range(20):
            turns = [("user", f"What is {number}?"), ("assistant", f"It is {number} </s> trees.")]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    for task, name in (("sft", "talk"), ("pretrain", "roam")):
        V = load_tokenizer(folder / "theirs").vocab_size + 8
        (folder / f"{task}.yaml").write_text(CONFIG.format(task=task, name=name, V=V), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--cache-dir", "cache", "--tokenizer", "theirs", "--config", "sft.yaml"]
        assert call("cache", "build", "roam", "talk", *options) == 0
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch):
    monkeypatch.chdir(place)


def test_the_cache_keeps_the_tokenizer(place, capsys):
    assert load_tokenizer("cache/tokenizer").sha256 == load_tokenizer("theirs").sha256
    assert call("cache", "build", "roam", "--cache-dir", "cache", "--config", "sft.yaml", "--force") == 0
    assert "U+2581" in capsys.readouterr().err
    assert call("cache", "verify", "cache") == 0


def test_the_report_says_what_is_lost(capsys):
    assert call("tokenizer", "report", "roam", "--tokenizer", "theirs", "--config", "sft.yaml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lossy"] == "U+2581 becomes a space"
    assert found["sources"][0]["texts"] > 0
    assert call("tokenizer", "report", "roam", "--tokenizer", "theirs", "--config", "sft.yaml") == 0
    assert "U+2581" in capsys.readouterr().out


@pytest.mark.slow
def test_trains_chats_and_audits(place, capsys, monkeypatch):
    assert call("train", "--config", "pretrain.yaml", "--run-dir", "runs/base", "--device", "cpu") == 0
    options = ["--set", "init_from=runs/base/checkpoints/best.pt", "--device", "cpu"]
    assert call("train", "--config", "sft.yaml", "--run-dir", "runs/chat", *options) == 0
    loaded = load_run("runs/chat")
    assert loaded.tokenizer.sha256 == load_tokenizer("theirs").sha256
    assert loaded.tokenizer.vocab_size == loaded.model.config.V  # only a public model keeps a larger embedding
    capsys.readouterr()
    assert call("generate", "runs/chat", "The dog", "--max-tokens", "5", "--device", "cpu") == 0
    assert capsys.readouterr().out.startswith("The dog")
    typed(monkeypatch, "What is 3? </s>\n/exit\n")
    assert call("chat", "runs/chat", "--max-tokens", "5", "--device", "cpu") == 0
    assert call("eval", "runs/chat", "--device", "cpu") == 0
    assert call("research", "batch", "show", "runs/chat", "--step", "1") == 0
    assert "[INST]" in capsys.readouterr().out
    assert call("audit", "runs/chat", "--notes", "notes", "--device", "cpu") in (0, 3, 4)


def test_the_vocabulary_of_a_new_model_is_that_of_the_tokenizer(place):
    V = load_tokenizer("theirs").vocab_size
    for given in (V - 1, V + 8):
        run = f"runs/{given}"
        assert call("train", "--config", "pretrain.yaml", "--run-dir", run, "--set", f"model.V={given}") == 0
        assert load_run(run).model.config.V == V


def test_a_template_that_cannot_be_masked(tmp_path, place, capsys):
    made.make("smollm", tmp_path / "theirs", chat_template=templates.STRIPS_OLD_THOUGHTS)
    options = ["--cache-dir", tmp_path / "cache", "--tokenizer", tmp_path / "theirs", "--config", "sft.yaml"]
    assert call("cache", "build", "talk", *options) == 1
    assert "<think>" in capsys.readouterr().err


def test_the_command_for_missing_caches_works_and_keeps_the_tokenizer(place, capsys):
    assert call("train", "--config", "pretrain.yaml", "--run-dir", "runs/start", "--device", "cpu") == 0
    options = ["--set", "init_from=runs/start", "--set", "data.token_cache=new cache", "--device", "cpu"]
    tuning = ["train", "--config", "pretrain.yaml", "--run-dir", "runs/tuned", *options]
    capsys.readouterr()
    assert call(*tuning) == 1
    assert not (place / "runs/tuned").exists()
    command = re.search(r"niels-gpt (cache build.*?), or set", capsys.readouterr().err)[1]
    words = shlex.split(command)
    assert ["--tokenizer", str(place / "runs/start/tokenizer")] == words[(at := words.index("--tokenizer")) : at + 2]
    assert call(*words) == 0
    assert call(*tuning) == 0


def test_a_failed_start_leaves_the_disk_as_it_was(place, capsys):
    assert call("train", "--config", "pretrain.yaml", "--run-dir", "runs/first", "--device", "cpu") == 0
    assert call("cache", "build", "roam", "--path", "notes", "--cache-dir", "ours", "--vocab-size", "360") == 0
    options = ["--set", "init_from=runs/first", "--set", "data.token_cache=ours", "--device", "cpu"]
    (place / "runs/empty").mkdir()
    (place / "runs/used").mkdir()
    (place / "runs/used/mine.txt").write_text("mine")
    before = sorted(place.rglob("*"))
    for folder in ("runs/a/b", "runs/empty", "runs/used"):
        capsys.readouterr()
        assert call("train", "--config", "pretrain.yaml", "--run-dir", folder, *options) == 1
        error = capsys.readouterr().err
        assert "tokenizer" in error and str(place / "runs/first/tokenizer") in error
    assert sorted(place.rglob("*")) == before
