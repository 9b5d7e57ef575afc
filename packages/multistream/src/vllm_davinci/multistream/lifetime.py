"""Keeps tensors alive while another stream still uses them.

An allocator reuses freed memory for the next allocation of the *same* stream at once. A tensor that
a second stream still reads must therefore be held, or marked, until the first stream is past that
use.
"""

from typing import Any

import torch

from vllm_davinci.multistream.device import Stream

_WITHOUT_TENSORS = (type(None), bool, int, float, str)


class KeepAlive:
    """Holds tensors until the streams have joined."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def hold(self, *tensors: torch.Tensor | None) -> None:
        """Holds tensors of this stream that a side stream reads, until `release`."""
        self._tensors.extend(tensor for tensor in tensors if tensor is not None)

    def cross(self, result: Any, user: Stream) -> None:
        """Marks tensors made on a side stream as used by `user`, in containers too.

        result: a tensor, None, a number, a string, or lists, tuples and dicts of them
        Raises TypeError for anything else: its tensors would be freed while they are used.
        They belong to the side stream's pool and outlive the join, so holding them is not enough:
        their memory may be reused only after the work of `user`.
        """
        if isinstance(result, torch.Tensor):
            if result.device.type != "cpu":
                result.record_stream(user)  # type: ignore[arg-type]
        elif isinstance(result, list | tuple):
            for each in result:
                self.cross(each, user)
        elif isinstance(result, dict):
            self.cross(list(result.values()), user)
        elif not isinstance(result, _WITHOUT_TENSORS):
            raise TypeError(
                f"work on a side stream returned {type(result).__name__}, in which tensors cannot "
                "be found. Return tensors, or tuples, lists or dicts of them."
            )

    def release(self) -> None:
        """Releases the held tensors; call it when the streams have joined."""
        self._tensors.clear()
