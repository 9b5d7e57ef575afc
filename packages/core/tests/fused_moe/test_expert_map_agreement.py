"""Ranks that read different expert maps do not start."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.forked import Ended
from vllm_davinci_testing.processes.ranks import run_ranks

PROGRAM = """
import sys
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_map_agreement import check_expert_maps
group = dist.new_group(backend="gloo")
for paths in {cases}:
    try:
        check_expert_maps(paths[rank], group)
        print("agreed")
    except ConfigurationError as error:
        print(error)
"""


def expert_map(*experts: list[int]) -> str:
    devices = [{"device_id": rank, "device_expert": own} for rank, own in enumerate(experts)]
    layer = {"layer_id": 3, "device_count": len(experts), "device_list": devices}
    return json.dumps({"moe_layer_count": 1, "layer_list": [layer]})


def said(ended: Ended) -> list[str]:
    assert ended.status == 0, ended.output
    return [line for line in ended.stdout.splitlines() if "xpert" in line or line == "agreed"]


def test_ranks_with_different_maps_are_refused_by_name(tmp_path: Path) -> None:
    first, same, other = (str(tmp_path / name) for name in ("first", "same", "other"))
    missing = str(tmp_path / "missing")
    Path(first).write_text(expert_map([0, 1], [2, 3]))
    Path(same).write_text(expert_map([0, 1], [2, 3]).replace(", ", ",\n"))
    Path(other).write_text(expert_map([0, 2], [1, 3]))
    cases = [(first, same), (first, other), (None, first), (None, None), (first, missing)]
    for rank, ended in enumerate(run_ranks(PROGRAM.format(cases=cases), 2)):
        agreed, different, with_and_without, neither, unreadable = said(ended)
        assert agreed == neither == "agreed"
        for text, paths in ((different, (first, other)), (with_and_without, ("none", first))):
            assert "Ranks that exchange tokens have different expert maps" in text
            for number, path in enumerate(paths):
                assert f"rank {number} (pid " in text and f" has {path}: " in text, text
        assert text.count("SHA-256") == 1 and different.count("SHA-256") == 2
        assert f"{missing!r} cannot be read" in unreadable
        assert ("rank 1 (pid" in unreadable) == (rank == 0)
