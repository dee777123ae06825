"""Checks that the processes of a run agree: the batch divides evenly, and configs and data are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import differences, to_dict
from niels_gpt.system.processes import World


def check_rows(config: RunConfig, world: World) -> None:
    """Raise ValueError if train.B is not divisible by the number of processes, with values that are."""
    rows, size = config.train.B, world.size
    if rows % size:
        near = sorted({rows // size * size or size, -(-rows // size) * size})
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"train.B={rows} is not divisible by {size} processes: use train.B={' or '.join(map(str, near))}, "
            f"or one of {', '.join(map(str, divisors))} processes"
        )


def check_same(config: RunConfig, fingerprint: Mapping[str, str], options: Mapping[str, Any], world: World) -> None:
    """Raise ValueError for the first difference between the configs, data or options of the processes.

    Paths of data may differ between machines; its content may not.
    """
    settings = {**options, **{key: value for key, value in to_dict(config).items() if key not in ("data", "init_from")}}
    settings["splice"] = {key: value for key, value in settings["splice"].items() if key != "base"}
    settings["the data of"] = dict(fingerprint)
    by_rank = world.all_gather(settings)
    with world.fail_together():
        for rank, other in enumerate(by_rank):
            for key, (ours, theirs) in differences(by_rank[0], other).items():
                name = key.replace("the data of.", "the data of ")
                raise ValueError(
                    f"the processes of this run differ: {name} is {ours!r} on rank 0 and {theirs!r} on rank {rank}; "
                    "start all of them with the same command on the same data"
                )
