"""Each config opens its task."""

import pytest

from niels_gpt.training.tasks.byte_task import ByteTask
from niels_gpt.training.tasks.registry import open_task
from niels_gpt.training.tasks.splice_task import SpliceTask
from niels_gpt.training.tasks.token_task import PretrainTask, SFTTask
from tests import token_caches
from tests.training import small_config, write_texts


def test_the_task_of_a_config(tmp_path):
    texts = write_texts(tmp_path / "data")
    assert type(open_task(small_config(texts))) is ByteTask
    assert type(open_task(small_config(texts, "task=splice", "splice.num_docs=2"))) is SpliceTask


@pytest.mark.parametrize(("kind", "task"), [("pretrain", PretrainTask), ("sft", SFTTask)])
def test_the_task_of_a_token_config(kind, task):
    assert type(open_task(token_caches.small_config(kind))) is task
