"""Finding runs, and loading their models with the tokenizers."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import dump_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import loading
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import (
    LoadedRun,
    check_unchanged,
    claimed_run,
    find_run,
    find_unfinished_pipeline,
    find_unfinished_run,
    history,
    is_run,
    load_run,
    names_run,
    new_run,
)
from niels_gpt.runs.pipeline import PHASES, PipelineFolder
from niels_gpt.tokenizer import ByteTokenizer
from tests import token_caches
from tests.faults import flipped
from tests.training import small_config


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(path, *, steps=(2,), best=None, config=None, tokenizer=None, data=None):
    """A run folder with checkpoints whose weights equal their steps."""
    run = RunFolder(path)
    run.checkpoints.mkdir(parents=True)
    config = config or small_config(path)
    run.write_config(config)
    run.write_tokenizer(tokenizer or ByteTokenizer())
    for step in steps:
        model = GPT(config.model)
        torch.nn.init.constant_(model.tok_emb.weight, step)
        extra = {"best": None, "data": data or {}}
        run.save(model, None, step, extra, numbered=True, best=step == best, keep=9)
    return run


def token_run(path, **options):
    return make_run(path, config=token_caches.small_config("sft"), tokenizer=token_caches.tokenizer(), **options)


def weight(loaded):
    return loaded.model.tok_emb.weight[0, 0].item()


# --- finding -----------------------------------------------------------------------------------------


def test_a_run_or_a_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/checkpoint.json").write_text("{}", encoding="utf-8")
    (tmp_path / "best.pt").write_bytes(b"")
    assert is_run(tmp_path / "run")
    assert not is_run(tmp_path / "latest")
    assert not is_run(tmp_path / "best.pt")
    assert not is_run(tmp_path / "nowhere")


def test_new_runs_are_numbered(tmp_path):
    for name in ("train", "train-2", "train-3"):
        run = new_run("train")
        assert str(run.path) == f"runs/{name}"
        run.path.mkdir(parents=True)
    assert str(new_run("other").path) == "runs/other"


def test_a_claimed_run_is_nobody_elses(tmp_path, monkeypatch):
    """Whoever saw the same free name takes the next one."""
    with claimed_run("train") as first:
        assert first.path.is_dir()
        seen = iter([first.path, first.path])  # as two processes see it before the first one has created it
        real = loading.new_run
        monkeypatch.setattr(loading, "new_run", lambda name: RunFolder(next(seen, None) or real(name).path))
        with claimed_run("train") as second:
            assert (str(first.path), str(second.path)) == ("runs/train", "runs/train-2")
            (second.path / "config.yaml").touch()
        assert second.path.is_dir()
    assert not first.path.exists()  # it stayed empty


def test_an_unused_claim_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="mistake"), claimed_run("train"):
        raise ValueError("mistake")
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_claimed_is_left_to_the_writer(tmp_path):
    (tmp_path / "runs").write_text("a file", encoding="utf-8")
    with claimed_run("train") as run:
        assert str(run.path) == "runs/train" and not run.path.exists()


def test_the_newest_run_is_the_default(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"runs/.*niels-gpt demo.*RUN"):
        find_run(None)
    for age, name in enumerate(("runs/a", "runs/pipeline/sft", "runs/b")):
        run = make_run(tmp_path / name, steps=())
        os.utime(run.config_path, (1000 - age, 1000 - age))
    assert str(find_run(None).path) == "runs/a"
    os.utime("runs/pipeline/sft/config.yaml", (2000, 2000))
    assert str(find_run(None).path) == "runs/pipeline/sft"
    assert "".join(capsys.readouterr()) == ""
    assert find_run(tmp_path / "runs/b").path == tmp_path / "runs/b"
    with pytest.raises(ValueError, match=r"runs/none.*config\.yaml"):
        find_run(tmp_path / "runs/none")


def make_pipeline(path, *, pretrain, sft=()):
    """A pipeline folder; the arguments are the steps of the checkpoints of each phase, None for a phase not begun."""
    for name, steps in (("pretrain", pretrain), ("sft", sft)):
        if steps is not None:
            make_run(path / name, steps=steps)
        (path / f"{name}.yaml").write_text(dump_config(small_config(path, "train.total_steps=9")), encoding="utf-8")
    return path


def test_a_pipeline_is_a_run(tmp_path):
    for name, pretrain, sft, used in (
        ("begun", (2,), None, "pretrain"),
        ("tuning", (2,), (), "pretrain"),
        ("tuned", (2,), (5,), "sft"),
        ("empty", (), None, "sft"),
    ):
        folder = make_pipeline(tmp_path / "runs" / name, pretrain=pretrain, sft=sft)
        assert names_run(str(folder))
        if name != "empty":
            assert find_run(folder).path == folder / used
            assert find_run(None).path == Path("runs") / name / used
            assert load_run(folder).step == (5 if used == "sft" else 2)
    with pytest.raises(ValueError, match=r"empty/sft.*config\.yaml"):
        find_run(tmp_path / "runs/empty")


def test_the_newest_unfinished_run(tmp_path):
    with pytest.raises(ValueError, match=r"runs/.*niels-gpt train RUN --resume"):
        find_unfinished_run()
    total = small_config(tmp_path).train.total_steps
    for age, (name, steps) in enumerate((("done", (total,)), ("half", (1,)), ("older", ()))):
        run = make_run(tmp_path / "runs" / name, steps=steps)
        os.utime(run.config_path, (1000 - age, 1000 - age))
    make_pipeline(tmp_path / "runs/pipe", pretrain=(2,), sft=(3,))
    assert str(find_unfinished_run().path) == "runs/half"
    assert str(find_unfinished_pipeline().path) == "runs/pipe"
    make_run(tmp_path / "runs/pipe2/pretrain")
    for name in ("half", "older"):
        shutil.rmtree(tmp_path / "runs" / name)
    shutil.rmtree(tmp_path / "runs/pipe2")
    with pytest.raises(ValueError, match=r"finished.*niels-gpt train runs/done --resume --steps N"):
        find_unfinished_run()
    make_run(tmp_path / "other/sft", steps=(9,))
    shutil.rmtree(tmp_path / "runs/pipe/sft")
    (tmp_path / "other/sft").rename(tmp_path / "runs/pipe/sft")
    with pytest.raises(ValueError, match=r"niels-gpt pipeline RUN --resume"):
        find_unfinished_pipeline()


def test_which_words_name_a_run(tmp_path):
    run = make_run(tmp_path / "runs/a")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/checkpoint.json").write_text("{}", encoding="utf-8")
    assert names_run("runs/a") and names_run(str(run.latest)) and names_run("shards")
    for word in ("runs", "nothing", "", "a\0b", "x" * 5000, "runs/a/config.yaml", "a.pt"):
        assert not names_run(word)


# --- loading -----------------------------------------------------------------------------------------


def test_a_run_is_loaded_with_its_best_checkpoint(tmp_path):
    run = make_run(tmp_path / "runs/a", steps=(2, 4, 6), best=4, data={"roam": "abc"})
    for loaded in (load_run("runs/a"), load_run(tmp_path / "runs/a", device="cpu"), load_run()):
        assert (loaded.step, weight(loaded), loaded.path.name) == (4, 4.0, "best.pt")
        assert not loaded.model.training
        assert isinstance(loaded.tokenizer, ByteTokenizer)
        assert loaded.config == run.read_config()
        assert loaded.data == {"roam": "abc"}
        assert loaded.home.path.resolve() == run.path
    assert load_run(run.path, device="cpu").run.path == run.path


def test_a_checkpoint_is_loaded(tmp_path):
    run = make_run(tmp_path / "runs/a", steps=(2, 4), best=2)
    for loaded in (load_run(run.latest), load_run(None, run.latest), load_run(run.path, run.latest, "cpu")):
        assert (loaded.step, weight(loaded), loaded.path) == (4, 4.0, run.latest)
        assert loaded.config == run.read_config()
    assert load_run(run.latest).run is None
    save_checkpoint("alone/a.pt", GPT(small_config(tmp_path).model), None, 7, small_config(tmp_path).model)
    loaded = load_run("alone/a.pt")
    assert (loaded.step, loaded.config, loaded.home) == (7, None, None)


def test_the_tokenizer_of_a_run(tmp_path):
    sha = token_caches.tokenizer().sha256
    run = token_run(tmp_path / "runs/a", data={"tokenizer": sha})
    assert load_run(run.path).tokenizer.sha256 == sha
    assert load_run(run.latest).tokenizer.sha256 == sha  # one folder up
    elsewhere = tmp_path / "elsewhere"
    save_checkpoint(elsewhere / "a.pt", GPT(token_caches.small_config("sft").model), None, 1, run.read_config().model)
    with pytest.raises(ValueError, match=r"a\.pt .*404.*tokenizer\.model.*--tokenizer"):
        load_run(elsewhere / "a.pt")
    assert load_run(elsewhere / "a.pt", tokenizer=run.tokenizer_path).tokenizer.sha256 == sha
    (elsewhere / "tokenizer.model").write_bytes(run.tokenizer_path.read_bytes())
    assert load_run(elsewhere / "a.pt").tokenizer.sha256 == sha  # beside it


def test_a_tokenizer_of_another_model_is_rejected(tmp_path):
    other = tmp_path / "other.model"
    other.write_bytes(token_caches.other_tokenizer().model)
    run = token_run(tmp_path / "runs/a", data={"tokenizer": token_caches.tokenizer().sha256})
    with pytest.raises(ValueError, match=r"best\.pt|latest\.pt.*tokenizer"):
        load_run(run.path, tokenizer=other)
    small = make_run(tmp_path / "runs/bytes")
    with pytest.raises(ValueError, match=r"other\.model has 404 ids.*V=256"):
        load_run(small.path, tokenizer=other)


def test_the_name_of_a_loaded_run(tmp_path):
    """A phase has the name of its pipeline, a checkpoint that of its run."""
    make_run(tmp_path / "runs/a")
    assert [load_run(path).name for path in (tmp_path / "runs/a", tmp_path / "runs/a/checkpoints/latest.pt")] == 2 * [
        "a"
    ]
    PipelineFolder(tmp_path / "runs").write_configs({name: RunConfig() for name in PHASES})
    assert load_run(tmp_path / "runs/a").name == "runs"
    shutil.copy(tmp_path / "runs/a/checkpoints/latest.pt", tmp_path / "alone.pt")
    assert load_run(tmp_path / "alone.pt").name == "alone"


def test_a_byte_model_of_256_ids_needs_no_tokenizer(tmp_path):
    config = small_config(tmp_path, "model.V=257")
    save_checkpoint("a.pt", GPT(config.model), None, 1, config.model)
    with pytest.raises(ValueError, match="257"):
        load_run("a.pt")
    assert "V: 257" in dump_config(config)


@pytest.mark.parametrize("text", ["one\r\ntwo", "a\r b"])
def test_a_text_is_encoded_as_in_training(tmp_path, text):
    by_bytes = LoadedRun(None, 0, tmp_path, None, ByteTokenizer())
    assert by_bytes.encode(text).tolist() == list(text.encode())
    tokenizer = token_caches.tokenizer()
    by_tokens = LoadedRun(None, 0, tmp_path, None, tokenizer)
    assert by_tokens.encode(text).tolist() == tokenizer.encode(text.replace("\r\n", "\n"))


def test_changed_data_is_rejected():
    check_unchanged({"roam": "a", "new": "b"}, {"roam": "a", "gone": "c"}, "runs/x")
    with pytest.raises(ValueError, match=r"runs/x.*: roam, wiki;"):
        check_unchanged({"roam": "a", "primer": "p", "wiki": "w"}, {"roam": "b", "primer": "p", "wiki": "v"}, "runs/x")


def test_no_flipped_bit_of_the_tokenizer_is_loaded_in_silence(tmp_path):
    run = token_run(tmp_path / "runs/a", data={"tokenizer": token_caches.tokenizer().sha256})
    for damaged in flipped(run.tokenizer_path.read_bytes(), count=30):
        run.tokenizer_path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tokenizer\.model"):
            load_run(run.path)


# --- the runs that the weights of a run came from ---------------------------------------------------


def started_from(path: Path, init_from: str = "") -> RunFolder:
    path.mkdir()
    run = RunFolder(path)
    run.write_config(RunConfig(init_from=init_from))
    return run


def names(run: RunFolder) -> list[str]:
    return [past.run.path.name for past in history(run)]


def test_from_the_newest_run_to_the_oldest(tmp_path):
    first = started_from(tmp_path / "first")
    second = started_from(tmp_path / "second", str(first.best))
    third = started_from(tmp_path / "third", str(second.checkpoints / "latest"))  # a sharded checkpoint
    assert names(third) == ["third", "second", "first"]
    newest, _, oldest = history(third)
    assert (newest.start, newest.earlier.path) == (second.checkpoints / "latest", second.path)
    assert (oldest.start, oldest.earlier, oldest.from_public) == (None, None, False)


def test_a_public_model_ends_it(tmp_path):
    started_from(tmp_path / "model")  # not followed: the name is that of a public model
    (past,) = history(started_from(tmp_path / "run", f"hf:{tmp_path}/model/checkpoints/best.pt"))
    assert (past.from_public, past.earlier) == (True, None)
    assert past.start == tmp_path / "model" / "checkpoints" / "best.pt"


def test_what_is_gone_ends_it(tmp_path):
    gone = tmp_path / "gone" / "checkpoints" / "best.pt"
    (past,) = history(started_from(tmp_path / "run", str(gone)))
    assert (past.start, past.earlier.path) == (gone, tmp_path / "gone")
    assert list(history(None)) == list(history(past.earlier)) == []


def test_a_circle_ends(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run = started_from(one, str(two / "checkpoints" / "best.pt"))
    started_from(two, str(one / "checkpoints" / "best.pt"))
    assert names(run) == ["one", "two"]
