"""Capabilities of each chip. Code asks for a capability here, never for a chip's name.

The rows are `chips.json`, which `nox -s docs` generates from the virtual NPU's files, one per chip,
which state each figure once, with its source.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
GIB = 1 << 30
# Tokens per cache block. The fused attention operator accepts multiples of 16 and is fastest with
# 128 (its documentation, parameter block_size).
BLOCK_SIZE_TOKENS = 128


@dataclass(frozen=True)
class FusedExperts:
    """Limits of the launches that move tokens to their experts' ranks and back.

    ranks:               supported group sizes
    hidden_sizes:        supported hidden sizes
    max_tokens:          most tokens of a rank in one launch
    communication:       name of the algorithm to request
    weights_at_dispatch: whether dispatch sends the experts' weights along with the rows
    max_top_k:           most experts per token
    max_experts:         most routed experts, redundant ones included
    max_local_experts:   most experts per rank
    max_places:          most slots: experts per rank times ranks
    """

    ranks: Collection[int]
    hidden_sizes: Collection[int]
    max_tokens: int
    communication: str
    weights_at_dispatch: bool
    max_top_k: int = 16
    max_experts: int = 1024
    max_local_experts: int = 1024
    max_places: int = 2048

    def window_bytes(
        self, tokens: int, hidden_size: int, num_experts: int, top_k: int, ranks: int
    ) -> int:
        """Bytes of the group's HCCL buffer that one launch needs.

        tokens: most of any rank in one launch. Source: aclnnMoeDistributeDispatchV2, HCCL_BUFFSIZE.
        """
        local = -(-num_experts // ranks)
        if self.weights_at_dispatch:
            rows = tokens * ranks * min(local, top_k)
            return 2 * (rows * hidden_size * 2 + 2 * MIB)

        def aligned(size: int, step: int) -> int:
            return -(-size // step) * step

        row = aligned(2 * hidden_size, 512)
        row_there = aligned(aligned(2 * hidden_size, 32) + 64, 512)
        return 2 * (local * tokens * ranks * row_there + top_k * tokens * row)


@dataclass(frozen=True)
class GraphLimits:
    """Resources available to all captured graphs of a device together.

    streams:         of the device, shared with other processes
    events:          likewise
    updatable_tasks: launches in task groups
    """

    streams: int
    events: int
    updatable_tasks: int = 1024 * 1024


@dataclass(frozen=True)
class Soc:
    """One chip.

    name:         prefix of the runtime's chip name
    generation:   as operator documents name chips ("A2", "A3", "310P"), or "other"
    cube_cores:   matrix cores
    memory_bytes: device memory of the largest variant
    dtypes:       supported model dtypes, preferred first
    fused_experts: limits of the fused expert launches; None if unsupported
    graphs:       limits of captured graphs
    """

    name: str
    generation: str
    cube_cores: int
    memory_bytes: int
    dtypes: tuple[torch.dtype, ...]
    fused_experts: FusedExperts | None = None
    graphs: GraphLimits = GraphLimits(streams=1984, events=65536)


def _numbers(allowed: dict[str, int] | list[int]) -> Collection[int]:
    if isinstance(allowed, list):
        return allowed
    return range(allowed["least"], allowed["most"] + 1, allowed["step"])


def _row(name: str, stated: dict[str, Any]) -> Soc:
    dtypes = (torch.float16, torch.float32)
    limits = stated["fused_experts"]
    if limits is not None:
        sets = {key: _numbers(limits[key]) for key in ("ranks", "hidden_sizes")}
        limits = FusedExperts(**{**limits, **sets})
    return Soc(
        name,
        stated["generation"],
        stated["cube_cores"],
        stated["memory_bytes"],
        (torch.bfloat16, *dtypes) if stated["has_bfloat16"] else dtypes,
        limits,
        GraphLimits(stated["streams"], stated["events"]),
    )


_STATED = json.loads(Path(__file__).with_name("chips.json").read_text(encoding="utf-8"))
_ANY = "Ascend"
# A chip without a row is assumed to be newer than the listed ones.
UNKNOWN = _row("unknown", _STATED.pop(_ANY))
# Longest prefix wins.
SOCS = tuple(_row(name, stated) for name, stated in _STATED.items())


def soc_of(device_name: str) -> Soc:
    """The row of a chip, by the runtime's name, for example `Ascend910B3`."""
    rows = [soc for soc in SOCS if device_name.startswith(soc.name)]
    return max(rows, key=lambda soc: len(soc.name), default=UNKNOWN)
