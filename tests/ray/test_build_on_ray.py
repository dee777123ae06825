"""Caches that are built on a Ray cluster equal those of one process, byte for byte, whatever dies meanwhile."""

import os
import signal
from pathlib import Path
from unittest import mock

import pyarrow
import pytest
from pyarrow import parquet

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.config import SourceConfig
from niels_gpt.data.reading.url_rows import check_sizes, list_url
from niels_gpt.data.url_files import iter_url_files, url_hashes
from niels_gpt.plugins import ray_cluster
from niels_gpt.plugins.ray_cluster import RayExecutor
from niels_gpt.system.executors import ThreadExecutor
from tests.cache import ByteTokenizer, conversations, documents, real_tokenizer, tree

pytest.importorskip("ray")

TEXTS = [*documents(120), *(f"text {i} " + "word " * (i % 50) for i in range(300))]
CHATS = [*conversations(100)]


class Killing(ByteTokenizer):
    """A tokenizer whose first few batches each kill the worker process that encodes them."""

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times = str(folder), times

    def encode(self, text):
        if text.startswith("text 150 "):
            for i in range(self.times):
                try:
                    os.close(os.open(Path(self.folder) / f"killed_{i}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


@pytest.fixture(scope="module")
def executor():
    with RayExecutor(cpus=3, same_versions=("sentencepiece", "numpy")) as opened:
        yield opened


def pretrain(folder, executor, tokenizer, texts=TEXTS, **changes):
    options = {"max_train_tokens": 6000, "max_val_tokens": 500, "shard_bytes": 1024, "seed": 3, "shuffle_buffer": 50}
    build_pretrain_cache(texts, folder, tokenizer=tokenizer, executor=executor, **options | changes)
    return tree(folder)


def sft(folder, executor, tokenizer):
    build_sft_cache(CHATS, folder, tokenizer=tokenizer, val_frac=0.2, seed=3, executor=executor)
    return tree(folder)


def test_caches_are_those_of_one_process(executor, tmp_path):
    tokenizer = real_tokenizer()
    for number, build in enumerate((pretrain, sft)):
        one = build(tmp_path / f"one_{number}", ThreadExecutor(1), tokenizer)
        assert len(one) > 5
        assert build(tmp_path / f"ray_{number}", executor, tokenizer) == one


def test_a_build_whose_workers_are_killed_gives_the_same_bytes(executor, tmp_path):
    one = pretrain(tmp_path / "one", ThreadExecutor(1), ByteTokenizer(), max_train_tokens=1 << 40)
    killing = Killing(tmp_path, 3)
    assert pretrain(tmp_path / "ray", executor, killing, max_train_tokens=1 << 40) == one
    assert len(list(tmp_path.glob("killed_*"))) == 3  # it happened


def test_a_task_that_kills_every_worker_is_an_error_and_leaves_no_cache(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RETRIES", 1)
    with pytest.raises(ConnectionError, match=r"lost 2 times .*WorkerCrashed.* resumes from the last complete shard"):
        pretrain(tmp_path / "cache", executor, Killing(tmp_path, 100), max_train_tokens=1 << 40)
    assert not (tmp_path / "cache").exists()
    one = pretrain(tmp_path / "one", ThreadExecutor(1), ByteTokenizer(), max_train_tokens=1 << 40)
    resumed = pretrain(tmp_path / "cache", executor, ByteTokenizer(), max_train_tokens=1 << 40)
    assert resumed == one


def test_the_error_of_a_worker_is_raised_as_it_is(executor):
    def work(job):
        raise ValueError(f"job {job} is bad")

    with pytest.raises(ValueError, match=r"^job 0 is bad$"):
        list(executor.in_order(range(9), work))


def test_jobs_are_read_ahead_by_a_bounded_number(executor):
    read = 0

    def jobs():
        nonlocal read
        while read < 400:
            read += 1
            yield read

    most = 0
    for done, (job, result) in enumerate(executor.in_order(jobs(), abs)):
        assert job == result == done + 1
        most = max(most, read - done)
    assert most <= ray_cluster.GROUP * (2 * 3 + 2)
    assert executor.status() == "1 node, 3 CPUs, 0 tasks in flight"


def test_pieces_come_in_order_and_are_retried(executor, tmp_path):
    folder = str(tmp_path)

    def work(job):
        for number in range(job + 1):
            if (job, number) == (5, 2):
                try:
                    os.close(os.open(Path(folder) / "killed", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield job, number

    found = list(executor.in_pieces(range(12), work, lambda job: job + 1))
    assert found == [(job, (job, number)) for job in range(12) for number in range(job + 1)]
    assert (tmp_path / "killed").exists()


def test_the_error_of_a_piece_is_raised_as_it_is(executor):
    def work(job):
        yield job
        raise ValueError(f"job {job} is bad")

    with pytest.raises(ValueError, match=r"^job 0 is bad$"):
        list(executor.in_pieces(range(9), work, lambda job: 3))


def test_a_large_row_group_does_not_pass_through_the_driver_at_once(executor, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"text": f"row {i} " + "word " * 200} for i in range(20_000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", use_dictionary=False)
    url = f"file://{folder}"
    with mock.patch.object(executor, "_ray", wraps=executor._ray) as ray:
        hashed = url_hashes(url, executor)
        samples = iter_url_files("x", SourceConfig(url), executor=executor, hashed=hashed)
        assert [sample.text for sample in samples] == [row["text"] for row in rows]
    assert ray.get.call_count >= 6  # 20 MB in pieces of 4


def test_a_folder_that_differs_between_nodes_is_refused(executor, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one row"}\n' * 50)
    url = f"file://{tmp_path}"
    listed = list_url(url)
    assert executor.on_each_node(len, listed) == [1]
    with pytest.raises(
        ValueError, match=r"a\.jsonl has 1,000 bytes instead of 7 on the node \S+: the folder is not sha"
    ):
        executor.on_each_node(check_sizes, [listed[0]._replace(bytes=7)])
    hashed = [each._replace(process="another:1") for each in url_hashes(url, executor)]
    (tmp_path / "a.jsonl").write_text('{"text": "two row"}\n' * 50)
    with pytest.raises(
        ValueError, match=r"a\.jsonl on the node \S+ is not what was hashed on the node another: .*not shared"
    ):
        list(iter_url_files("x", SourceConfig(url), executor=executor, hashed=hashed))


def test_a_node_with_other_versions_is_refused(executor, monkeypatch):
    monkeypatch.setattr(executor, "_versions", {"numpy": "0.1"})
    with pytest.raises(ValueError, match=r"has numpy [\d.]+, but this machine has 0.1;.* same version"):
        list(executor.in_order([1], abs))


def test_one_connection_per_process(executor):
    with pytest.raises(ValueError, match="already connected"):
        RayExecutor().__enter__()
