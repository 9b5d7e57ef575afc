"""Capabilities of each chip. Code asks for a capability here, never for a chip's name.

Sources: torch_npu's SoC list (torch_npu/csrc/core/npu/NpuVariables.h in its public repository) for
the names; the vendor's product pages for memory and dtypes; core counts as the runtime reports
them (AI cores of 910B: 24 or 20; of 310P: 8); the constraints of aclnnMoeDistributeDispatchV2 in
CANN's operator documentation for the fused launches of experts; aclrtCreateStream and
aclrtCreateEvent in CANN's runtime documentation for what graphs may hold. The virtual NPU has a
file for each chip, and a test holds these rows to those files.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

MIB = 1 << 20
GIB = 1 << 30
# Tokens per cache block. The fused attention operator takes multiples of 16 and is fastest with
# 128 (its documentation, parameter block_size).
BLOCK_SIZE_TOKENS = 128


@dataclass(frozen=True)
class FusedExperts:
    """Limits of the launches that move tokens to their experts' ranks and back.

    ranks:               sizes of the group that are possible
    hidden_sizes:        likewise
    max_tokens:          most tokens of a rank in one launch
    communication:       name of the algorithm to ask for
    weights_at_dispatch: whether the experts' weights travel with the rows
    max_top_k:           most experts of a token
    max_experts:         most routed experts, redundant ones among them
    max_local_experts:   most of a rank
    max_places:          most experts of a rank times ranks
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
        """Bytes of the group's HCCL buffer that a launch takes.

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
    """Resources that all captured graphs of a device may hold together.

    streams:         of the device, those of other processes included
    events:          likewise
    updatable_tasks: launches in task groups
    """

    streams: int
    events: int
    updatable_tasks: int = 1024 * 1024


@dataclass(frozen=True)
class Soc:
    """One chip.

    name:         prefix of what the runtime reports
    cube_cores:   matrix cores
    memory_bytes: device memory of the largest variant
    dtypes:       model dtypes it computes with, preferred first
    fused_experts: limits of the fused launches of experts; None where there are none
    graphs:       limits of captured graphs
    """

    name: str
    cube_cores: int
    memory_bytes: int
    dtypes: tuple[torch.dtype, ...]
    fused_experts: FusedExperts | None = None
    graphs: GraphLimits = GraphLimits(streams=1984, events=65536)


WITH_BF16 = (torch.bfloat16, torch.float16, torch.float32)
WITHOUT_BF16 = (torch.float16, torch.float32)

A2_EXPERTS = FusedExperts(
    (16, 32, 64, 128, 256),
    range(32, 7168 + 1, 32),
    256,
    "fullmesh",
    weights_at_dispatch=True,
    max_experts=512,
    max_local_experts=24,
)
A3_EXPERTS = FusedExperts(
    range(2, 768 + 1), range(1024, 8192 + 1), 512, "", weights_at_dispatch=False
)

# Longest prefix wins.
SOCS: tuple[Soc, ...] = (
    Soc("Ascend910B1", 24, 64 * GIB, WITH_BF16, A2_EXPERTS),
    Soc("Ascend910B2", 24, 64 * GIB, WITH_BF16, A2_EXPERTS),
    Soc("Ascend910B3", 20, 64 * GIB, WITH_BF16, A2_EXPERTS),
    Soc("Ascend910B4", 20, 32 * GIB, WITH_BF16, A2_EXPERTS),
    Soc("Ascend910_93", 24, 64 * GIB, WITH_BF16, A3_EXPERTS),
    Soc("Ascend910", 32, 32 * GIB, WITHOUT_BF16, graphs=GraphLimits(2048, 65535)),
    Soc("Ascend310P", 8, 24 * GIB, WITHOUT_BF16, graphs=GraphLimits(1024, 1023)),
    Soc("Ascend310B", 1, 8 * GIB, WITHOUT_BF16, graphs=GraphLimits(512, 65536)),
)

# A chip that this table does not know yet is taken to be newer than those it knows.
UNKNOWN = Soc("unknown", 24, 64 * GIB, WITH_BF16)


def soc_of(device_name: str) -> Soc:
    """The row of a chip, by the name the runtime reports, for example `Ascend910B3`."""
    rows = [soc for soc in SOCS if device_name.startswith(soc.name)]
    return max(rows, key=lambda soc: len(soc.name), default=UNKNOWN)
