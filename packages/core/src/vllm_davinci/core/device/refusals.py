"""Asks an operator of this device whether it supports sizes and dtypes, by calling it.

Limits depend on the chip and on the CANN release, whose documents differ. An operator checks its
arguments before it is launched, so a small call at start finds what serving would run into.
"""

import re
from collections.abc import Callable

import torch

# Status codes of aclnn's first phase: an unsupported parameter, and sizes that cannot be tiled over
# the cores. Source: CANN's documentation, status codes of aclnn.
_REFUSED = re.compile(r"\b(161002|561002)\b")


def refusal_of(call: Callable[[], object]) -> str | None:
    """The operator's reason for refusing the call; None if it accepts it.

    Raises any other error.
    """
    try:
        call()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        if _REFUSED.search(str(error)) is None:
            raise
        return str(error).strip()
    return None
