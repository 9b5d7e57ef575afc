"""Calls that CANN's documents allow of operators: the rows of the operator library."""

import ctypes
import json
from dataclasses import dataclass

from vllm_davinci.vnpu.activate import library_directory


@dataclass(frozen=True)
class Constraint:
    """
    rule:         completes "the argument must"
    chips:        "A2, A3, 310P" or fewer
    since, until: releases of CANN, "8.5", inclusive
    status:       what a call outside the rule returns
    limit:        of dtypes, sizes and amounts, which SoC `reference` does not have
    """

    operator: str
    argument: str
    rule: str
    source: str
    chips: str
    since: str
    until: str
    status: int
    limit: bool


def constraints() -> list[Constraint]:
    """All rows, of every chip and release. Loads the operator library, and libtorch_cpu with it."""
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    listed = library.vnpuListConstraints
    listed.restype = ctypes.c_char_p
    text: bytes = listed()
    return [Constraint(**json.loads(line)) for line in text.decode().splitlines()]
