"""A build on a cluster of three nodes, one of which dies in the middle."""

import time

import pytest

from niels_gpt.plugins.ray_cluster import RayExecutor
from niels_gpt.system.executors import ThreadExecutor
from tests.cache import ByteTokenizer
from tests.ray.test_build_on_ray import pretrain

cluster_utils = pytest.importorskip("ray.cluster_utils")


class Slow(ByteTokenizer):
    def encode(self, text):
        time.sleep(0.002)
        return super().encode(text)


def test_a_node_that_dies_changes_no_byte(tmp_path):
    texts = [f"text {i} " + "word " * (i % 50) for i in range(1500)]
    options = {"max_train_tokens": 1 << 40, "texts": texts, "shard_bytes": 8192}
    one = pretrain(tmp_path / "one", ThreadExecutor(1), ByteTokenizer(), **options)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        lost = cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        seen = []

        def dying():
            for i, text in enumerate(texts):
                if i == 600:
                    seen.append(executor.status())
                    cluster.remove_node(lost, allow_graceful=False)
                yield text

        class Rereadable:
            def __iter__(self):
                return dying()

        with RayExecutor(cluster.address) as executor:
            built = pretrain(tmp_path / "ray", executor, Slow(), **options | {"texts": Rereadable()})
        assert seen[0].startswith("3 nodes, 3 CPUs")
        assert built == one
    finally:
        cluster.shutdown()
