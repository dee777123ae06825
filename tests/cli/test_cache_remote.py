"""`cache build` to a URL, and with --engine: bad input is one line, and nothing incomplete is taken for a cache."""

import importlib.util
import json
import socket
import sys
import uuid

import fsspec
import pytest

from niels_gpt.cache import remote
from niels_gpt.cli.cache import app
from niels_gpt.cli.run_app import run_app
from tests.cache import tree

OPTIONS = ["--vocab-size", "300", "--tokenizer-documents", "50", "--shard-bytes", "4096"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i in range(30):
        (tmp_path / "notes" / f"{i}.md").write_text(f"# note {i}\n" + "a small model reads a note again\n" * 5)
    return tmp_path


@pytest.fixture
def url():
    address = f"memory://bucket-{uuid.uuid4().hex}/cache"
    yield address
    filesystem, path = fsspec.core.url_to_fs(address)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


@pytest.fixture
def run(folder, capsys):
    def command(*arguments):
        """(exit code, stdout, stderr)"""
        with pytest.raises(SystemExit) as ended:
            run_app(app, [*map(str, arguments)], name="niels-gpt cache")
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return command


def at(url):
    filesystem, path = fsspec.core.url_to_fs(url)
    return {name.removeprefix(path).strip("/"): filesystem.cat_file(name) for name in filesystem.find(path)}


def test_the_caches_at_a_url_are_the_local_ones(run, folder, url):
    code, out, err = run("build", "roam", "--path", "notes", "--cache-dir", url, *OPTIONS, "--json")
    assert code == 0, err
    assert json.loads(out)[0]["folder"] == f"{url}/pretrain/roam"
    assert json.loads(out)[0]["state"] == "built"
    assert run("build", "roam", "--path", "notes", "--cache-dir", "local", *OPTIONS)[0] == 0
    local = {name: data for name, data in tree(folder / "local").items() if name not in ("skipped.json", "notes.json")}
    assert at(url) == local
    _, out, _ = run("build", "roam", "--path", "notes", "--cache-dir", url, *OPTIONS, "--json")
    assert json.loads(out)[0]["state"] == "up to date"
    code, out, _ = run("verify", url)
    assert code == 0
    assert "verified" in out
    code, out, _ = run("inspect", f"{url}", "--seed", "1")
    assert code == 0
    assert "note" in out


def test_a_damaged_published_shard_is_replaced_by_force(run, folder, url):
    arguments = ["build", "roam", "--path", "notes", "--cache-dir", url, *OPTIONS, "--json"]
    assert run(*arguments)[0] == 0
    before = at(url)
    filesystem, path = fsspec.core.url_to_fs(f"{url}/pretrain/roam/train/shard_00000.bin")
    filesystem.pipe_file(path, b"x" * filesystem.size(path))
    code, _, err = run("verify", url)
    assert code == 1
    assert f"{url}/pretrain/roam/train/shard_00000.bin differs" in err
    assert f"cache build roam --cache-dir {url} --force" in err
    assert err.count("\n") == 1
    assert json.loads(run(*arguments)[1])[0]["state"] == "up to date"
    assert json.loads(run(*arguments, "--force")[1])[0]["state"] == "built"
    assert at(url) == before


def test_commands_name_a_cache_by_its_url(run, folder, url):
    assert run("build", "roam", "--path", "notes", "--cache-dir", url, *OPTIONS)[0] == 0
    assert run("build", "roam", "--path", "notes", "--cache-dir", "local", *OPTIONS)[0] == 0
    _, out, _ = run("verify", url)
    assert out.startswith(f"{url}/pretrain/roam: ")
    assert json.loads(run("verify", url, "--json")[1]) == [f"{url}/pretrain/roam"]
    assert json.loads(run("inspect", url, "--json", "--seed", "1")[1])[0]["folder"] == f"{url}/pretrain/roam"
    code, out, err = run("diff", f"{url}/pretrain/roam", "local/pretrain/roam")
    assert (code, out, err) == (0, f"{url}/pretrain/roam and local/pretrain/roam are identical\n", "")
    (folder / "notes" / "0.md").write_text("another note")
    assert run("build", "roam", "--path", "notes", "--cache-dir", "local", *OPTIONS)[0] == 0
    code, out, _ = run("diff", "local/pretrain/roam", f"{url}/pretrain/roam")
    assert code == 1 and "/shard_00000.bin: differ from token 0 on" in out
    code, _, err = run("diff", f"{url}/nothing", "local/pretrain/roam")
    assert code == 1 and f"no cache at {url}/nothing" in err


def test_an_interrupted_upload_is_repeated(run, url, monkeypatch):
    upload = remote.publish_cache

    def failing(folder, target):
        monkeypatch.setattr(remote, "publish_cache", upload)
        raise OSError(5, f"cannot write {target}: the network is down")

    monkeypatch.setattr(remote, "publish_cache", failing)
    arguments = ["build", "roam", "--path", "notes", "--cache-dir", url, *OPTIONS]
    code, _, err = run(*arguments)
    assert code == 1
    assert "the network is down" in err
    assert "pretrain/roam/meta.json" not in at(url)
    assert run(*arguments)[0] == 0
    assert "pretrain/roam/meta.json" in at(url)


def test_no_permission_is_noticed_before_any_work(run, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    code, _, err = run("build", "roam", "--path", "notes", "--cache-dir", "memory://closed/cache", *OPTIONS)
    assert code == 1
    assert "no permission to write memory://closed/cache (Access Denied): check the credentials" in err
    assert err.count("\n") == 1


def test_ray_is_not_installed(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    code, _, err = run("build", "roam", "--path", "notes", "--cache-dir", "c", "--engine", "ray", *OPTIONS)
    assert code == 1
    assert err.count("\n") == 1 and "--engine ray" in err and "niels-gpt[ray]" in err


def test_a_ray_address_that_does_not_answer(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", sys.modules["json"])  # it is not used before the address answers
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for text in (address, f"ray://{address}"):
            code, _, err = run("build", "roam", "--cache-dir", "c", "--engine", "ray", "--address", text, *OPTIONS)
            assert code == 1
            assert f"no Ray cluster answers at {text}: Connection refused; " in err
            assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "spark"], "--engine must be threads or ray, got 'spark'"),
        (["--address", "auto"], "add --engine ray, or omit it"),
        (["--engine", "ray", "--address", "nowhere"], "use HOST:PORT, ray://HOST:PORT, or auto"),
        (["--engine", "ray", "--address", "h:1", "--threads", "2"], "--threads is the number of CPUs of a local"),
        (["--path", "memory://a/b"], "roam cannot be read from memory://a/b: a URL needs a source of your own"),
        (["--cache-dir", "nothing://bucket/cache"], "cannot open nothing://bucket/cache: Protocol not known"),
    ],
)
def test_bad_options(run, monkeypatch, options, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    code, _, err = run("build", "roam", *OPTIONS, *options)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_a_protocol_without_its_package(run, monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    code, _, err = run("build", "roam", "--cache-dir", "s3://bucket/cache", *OPTIONS)
    assert code == 1
    assert err == "error: cannot open s3://bucket/cache: s3:// needs another package: pip install s3fs\n"
