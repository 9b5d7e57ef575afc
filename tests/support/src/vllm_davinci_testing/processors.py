"""Runs tests on the instruction sets of older processors: `pytest --processor=avx2`.

Libraries read variables at their first use. Observed with torch 2.13: ATEN_CPU_CAPABILITY and
ONEDNN_MAX_CPU_ISA work on every x86-64. Of MKL's variables, MKL_ENABLE_INSTRUCTIONS works only on
Intel's processors; on others only MKL_CBWR=COMPATIBLE changes a product. The virtual NPU's own
loops obey ATEN_CPU_CAPABILITY.
"""

import os
from pathlib import Path

# Newer processors first.
PROCESSORS: dict[str, dict[str, str]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
    },
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
    },
}
# The newest processor older than this machine's.
OLDER = "older"
CHOICES = (*PROCESSORS, OLDER)


def facts() -> tuple[str, frozenset[str]]:
    """Returns this processor's name and its features from /proc/cpuinfo."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found.get("model name", "unknown"), frozenset(found.get("flags", "").split())


def resolved(choice: str) -> str:
    """Returns the selected row of PROCESSORS."""
    if choice != OLDER:
        return choice
    return "avx2" if "avx512f" in facts()[1] else "sse4"


def use(choice: str) -> None:
    """Limits this process and its children to a processor's instructions; call it before importing
    torch.
    """
    os.environ.update(PROCESSORS[resolved(choice)])


def description(choice: str | None) -> str:
    used = f", with the instruction sets of {resolved(choice)}" if choice else ""
    return f"processor: {facts()[0]}, {len(os.sched_getaffinity(0))} cores{used}"
