"""`cache build --engine ray`: the cache of one process, and one line for what goes wrong."""

import pytest

from niels_gpt.cli.cache import app
from niels_gpt.cli.run_app import run_app
from tests.cache import tree

pytest.importorskip("ray")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i in range(60):
        (tmp_path / "notes" / f"{i}.md").write_text(f"# note {i}\n" + "a small model reads a note again\n" * (i % 9))

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            run_app(app, [*map(str, arguments)], name="niels-gpt cache")
        return ended.value.code or 0, capsys.readouterr().err

    return command


OPTIONS = ["--vocab-size", "400", "--shard-bytes", "2048"]


def test_the_command_writes_the_cache_of_one_process(run, tmp_path):
    for folder, engine in (("one", ["--threads", "1"]), ("ray", ["--engine", "ray", "--threads", "2"])):
        code, err = run("build", "roam", "primer", "--cache-dir", folder, *OPTIONS, *engine)
        assert code == 0, err
    one, ray = (tree(tmp_path / name) for name in ("one", "ray"))
    assert ray.pop("skipped.json", None) == one.pop("skipped.json", None)
    assert ray == one
    assert len(one) > 20


def test_a_folder_that_the_workers_do_not_see_is_one_line(run, tmp_path):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/not-shared/a.jsonl", b'{"text": "one row"}\n' * 50)
    (tmp_path / "mine.yaml").write_text("data: {sources: {mine: {path: 'memory://not-shared'}}}\n")
    options = ["--config", "mine.yaml", "--cache-dir", "c", *OPTIONS, "--engine", "ray", "--threads", "2"]
    code, err = run("build", "mine", *options)
    assert code == 1
    assert "memory://not-shared/a.jsonl is missing on the node" in err
    assert "the folder is not shared" in err
    assert "Traceback" not in err
    assert not (tmp_path / "c" / "pretrain" / "mine").exists()
