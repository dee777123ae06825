"""The folder of a pipeline: its runs and their stored configs. tests/cli/test_pipeline.py runs whole pipelines."""

import pytest

from niels_gpt.config.yaml_file import load_pipeline
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.runs.pipeline import PHASES, PipelineFolder


def test_configs_are_stored_beside_the_runs(tmp_path):
    folder = PipelineFolder(tmp_path / "new" / "one")
    assert not folder.exists
    with pytest.raises(ValueError, match=r"one holds no pipeline.*pretrain\.yaml"):
        folder.read_configs()
    phases = load_pipeline(overrides=["sft.train.total_steps=7", "sft.train.warmup_steps=1"])
    folder.write_configs(phases)
    assert folder.exists and folder.read_configs() == {name: with_absolute_paths(p) for name, p in phases.items()}
    names = [path.name for path in folder.path.iterdir() if not path.name.startswith(".")]
    assert sorted(names) == ["pretrain.yaml", "sft.yaml"]
    assert [run.path for run in folder.runs.values()] == [folder.path / name for name in PHASES]
