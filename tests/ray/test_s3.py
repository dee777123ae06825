"""Caches and input on an S3 server: built by one process or on Ray, read by datasets and by training."""

import json
import os

import numpy as np
import pytest
import torch

from niels_gpt.cache import remote
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.sources.build import build
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.cli.main import main
from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data.registry import get_source
from niels_gpt.plugins.ray_cluster import RayExecutor
from niels_gpt.system.executors import ThreadExecutor
from tests.cache import real_tokenizer, tree

pytest.importorskip("ray")
pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

ROWS = [{"text": f"row {i}: " + "the model reads a note " * (i % 30)} for i in range(400)]


@pytest.fixture(scope="module")
def s3():
    """The S3 file system of a server on this machine, with one bucket."""
    import s3fs

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    filesystem = s3fs.S3FileSystem()
    filesystem.mkdir("bucket")
    for part in range(4):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[100 * part : 100 * (part + 1)])
        filesystem.pipe_file(f"bucket/corpus/part_{part}.jsonl", lines.encode())
    yield filesystem
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code


def files_at(s3, path):
    return {name.removeprefix(f"{path}/"): s3.cat_file(name) for name in s3.find(path)}


@pytest.fixture
def local_cache(tmp_path):
    """The cache of the same rows in local files, built by one process."""
    (tmp_path / "corpus").mkdir()
    for part in range(4):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[100 * part : 100 * (part + 1)])
        (tmp_path / "corpus" / f"part_{part}.jsonl").write_text(lines)
    source = get_source("corpus", DataConfig(sources={"corpus": SourceConfig(str(tmp_path / "corpus"))}))
    settings = BuildSettings(tmp_path / "local", shard_bytes=2048, executor=ThreadExecutor(1))
    return build(source, settings, real_tokenizer()).folder


def test_input_and_output_on_s3_with_ray_give_the_local_cache(s3, local_cache, tmp_path):
    source = get_source("corpus", DataConfig(sources={"corpus": SourceConfig("s3://bucket/corpus")}))
    with RayExecutor(cpus=2) as executor:
        settings = BuildSettings(
            remote.staging_folder("s3://bucket/ray"), shard_bytes=2048, executor=executor, url="s3://bucket/ray"
        )
        result = build(source, settings, real_tokenizer())
        assert result.state == "built"
        assert build(source, settings, real_tokenizer()).state == "up to date"
    s3.invalidate_cache()
    assert files_at(s3, "bucket/ray/pretrain/corpus") == tree(local_cache)
    assert not result.folder.exists()  # no second copy stays on this machine
    mine, theirs = TokenStream(local_cache / "train"), TokenStream("s3://bucket/ray/pretrain/corpus/train")
    assert len(mine.shards) > 5
    for number in range(0, len(mine.documents), 29):
        assert np.array_equal(mine.document(number), theirs.document(number))


def test_commands_build_verify_and_train_at_a_url(s3, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("data: {sources: {corpus: {path: s3://bucket/corpus}}}\n")
    options = ["--cache-dir", "s3://bucket/cache", "--vocab-size", "300", "--config", "mine.yaml"]
    command("cache", "build", "corpus", *options)
    assert "built" in capsys.readouterr().out
    command("cache", "verify", "s3://bucket/cache")
    assert "verified" in capsys.readouterr().out
    run = [
        "--set",
        "task=pretrain",
        "--set",
        "data.token_cache=s3://bucket/cache",
        "--set",
        "train.p_train={corpus: 1.0}",
    ]
    size = [
        "--set",
        "model.T=16",
        "--set",
        "model.C=16",
        "--set",
        "model.L=1",
        "--set",
        "model.H=2",
        "--set",
        "train.B=2",
    ]
    command("train", *run, *size, "--steps", "2", "--run-dir", "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) >= 2
    batch = CacheFolder("s3://bucket/cache").pretrain("corpus", "train", T=16)
    assert batch.get_batch(B=2, generator=torch.Generator().manual_seed(1))[0].shape == (2, 16)


def test_a_shard_that_differs_from_its_hash(s3, local_cache):
    remote.publish_cache(local_cache, "s3://bucket/damaged")
    data = s3.cat_file("bucket/damaged/train/shard_00001.bin")
    s3.pipe_file("bucket/damaged/train/shard_00001.bin", data[:10] + b"!" + data[11:])
    stream = TokenStream("s3://bucket/damaged/train")
    assert len(stream.shards[0].tokens)
    with pytest.raises(CacheError, match=r"^s3://bucket/damaged/train/shard_00001.bin differs from its sha256"):
        _ = stream.shards[1].tokens


def test_a_bucket_that_does_not_exist(s3):
    with pytest.raises(CacheError, match="no cache at s3://nobody/cache"):
        CacheFolder("s3://nobody/cache")
    with pytest.raises(OSError, match="cannot write s3://nobody/cache: "):
        remote.check_writable("s3://nobody/cache")


def test_a_bucket_without_permission(s3):
    from moto import settings
    from moto.core.responses import ActionAuthenticatorMixin

    settings.INITIAL_NO_AUTH_ACTION_COUNT, ActionAuthenticatorMixin.request_count = 0.0, 0
    try:
        s3.invalidate_cache()
        with pytest.raises(PermissionError, match=r"^\[Errno 13\] no permission to write s3://bucket/x .*credentials"):
            remote.check_writable("s3://bucket/x")
        with pytest.raises(PermissionError, match=r"no permission to (read|list) s3://bucket/cache"):
            CacheFolder("s3://bucket/cache")
    finally:
        settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")


def test_a_server_that_does_not_answer(s3, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(OSError, match=r"cannot (read|list|write) s3://bucket/x.*check the address and the network"):
            remote.check_writable("s3://bucket/x")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
