"""Checks that the processes of a run agree: the batch divides evenly, and configs and data are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from niels_gpt.config import RunConfig
from niels_gpt.config.yaml_file import differences, to_dict
from niels_gpt.system.processes import World


def check_rows(config: RunConfig, world: World) -> None:
    """Raise ValueError where the rows of an update cannot be shared out evenly, with what could."""
    rows, size = config.train.B, world.size
    if rows % size:
        near = sorted({rows // size * size or size, -(-rows // size) * size})
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"train.B={rows} rows do not share out over {size} processes: take train.B={' or '.join(map(str, near))}, "
            f"or one of {', '.join(map(str, fitting))} processes"
        )


def check_same(config: RunConfig, fingerprint: Mapping[str, str], options: Mapping[str, Any], world: World) -> None:
    """Raise ValueError where the processes have different configs, data or options, with the first that differs.

    Where data lies may differ from machine to machine; what is in it may not.
    """
    whole = to_dict(config)
    own = {**options, **{key: value for key, value in whole.items() if key not in ("data", "init_from")}}
    own["splice"] = {key: value for key, value in own["splice"].items() if key != "base"}
    own["the data of"] = dict(fingerprint)
    found = world.gather(own)
    with world.together():
        for rank, other in enumerate(found):
            for key, values in differences(found[0], other).items():
                name = key.replace("the data of.", "the data of ")
                raise ValueError(
                    f"the processes of this run differ: {name} is {values[0]!r} on rank 0 and {values[1]!r} on rank "
                    f"{rank}; start all of them with the same command on the same data"
                )
