"""A layer's launches, observed from Python."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LaunchCounter(TorchDispatchMode):
    """Records the computing operators called in this context, not views or allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # `contiguous` copies only if the tensor is not contiguous.
        is_view = func.is_view and (isinstance(result, list) or _same_memory(result, args[0]))
        name = func.name().split(".")[0]
        if not is_view and "empty" not in name:
            self.names.append(name)
        return result


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
