"""What each chip can do. Code asks for a capability here, never for a chip's name.

Sources: torch_npu's SoC list (torch_npu/csrc/core/npu/NpuVariables.h in its public repository) for
the names; the vendor's product pages for memory and dtypes; core counts as the runtime reports
them (AI cores of 910B: 24 or 20; of 310P: 8).
"""

from dataclasses import dataclass

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Soc:
    """One chip.

    name:         prefix of what the runtime reports
    cube_cores:   matrix cores
    vector_cores: vector cores
    memory_bytes: device memory of the largest variant
    dtypes:       model dtypes it computes with, preferred first
    """

    name: str
    cube_cores: int
    vector_cores: int
    memory_bytes: int
    dtypes: tuple[torch.dtype, ...]


WITH_BF16 = (torch.bfloat16, torch.float16, torch.float32)
WITHOUT_BF16 = (torch.float16, torch.float32)

# Longest prefix wins.
SOCS: tuple[Soc, ...] = (
    Soc("Ascend910B1", 24, 48, 64 * GIB, WITH_BF16),
    Soc("Ascend910B2", 24, 48, 64 * GIB, WITH_BF16),
    Soc("Ascend910B3", 20, 40, 64 * GIB, WITH_BF16),
    Soc("Ascend910B4", 20, 40, 32 * GIB, WITH_BF16),
    Soc("Ascend910_93", 24, 48, 64 * GIB, WITH_BF16),
    Soc("Ascend910", 32, 32, 32 * GIB, WITHOUT_BF16),
    Soc("Ascend310P", 8, 7, 24 * GIB, WITHOUT_BF16),
    Soc("Ascend310B", 1, 1, 8 * GIB, WITHOUT_BF16),
)

# A chip that this table does not know yet is taken to be newer than those it knows.
UNKNOWN = Soc("unknown", 24, 48, 64 * GIB, WITH_BF16)


def soc_of(device_name: str) -> Soc:
    """The row of a chip, by the name the runtime reports, for example `Ascend910B3`."""
    rows = [soc for soc in SOCS if device_name.startswith(soc.name)]
    return max(rows, key=lambda soc: len(soc.name), default=UNKNOWN)
