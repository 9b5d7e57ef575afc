"""The answer of an operator of this device to sizes and dtypes, found by calling it.

Limits depend on the chip and on the release of CANN, whose documents differ. An operator checks its
arguments before it is launched, so a small call at start says what serving would run into.
"""

import re
from collections.abc import Callable

import torch

# Of aclnn's first phase: a parameter that it does not take, and sizes that it cannot divide among
# the cores. Source: CANN's documentation, status codes of aclnn.
_REFUSED = re.compile(r"\b(161002|561002)\b")


def refusal_of(call: Callable[[], object]) -> str | None:
    """The operator's reason against a call that it does not take; None if it takes it.

    Raises what else goes wrong.
    """
    try:
        call()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        if _REFUSED.search(str(error)) is None:
            raise
        return str(error).strip()
    return None
