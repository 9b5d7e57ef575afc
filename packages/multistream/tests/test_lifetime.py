"""Tensors that one stream produces and another uses."""

from typing import Any

import pytest
import torch

from vllm_davinci.multistream.lifetime import KeepAlive


class Marked(torch.Tensor):
    """A tensor that claims to be on a device and records the streams that use it."""

    device = torch.device("meta")
    users: list[object]

    def record_stream(self, user: object) -> None:
        self.users.append(user)


def marked() -> Marked:
    tensor = torch.zeros(2).as_subclass(Marked)
    tensor.users = []
    return tensor


def test_tensors_in_containers_are_marked_as_used_by_the_stream():
    tensors = [marked() for _ in range(4)]
    user: Any = object()
    KeepAlive().cross(
        (tensors[0], [tensors[1], None, 3], {"a": tensors[2], "b": (tensors[3],)}, "text"), user
    )
    assert [tensor.users for tensor in tensors] == [[user]] * 4


def test_a_result_in_which_tensors_cannot_be_found_is_an_error():
    with pytest.raises(TypeError, match="returned object, in which tensors cannot be found"):
        KeepAlive().cross([object()], object())  # type: ignore[arg-type]


def test_held_tensors_live_until_released():
    held = KeepAlive()
    tensor = torch.zeros(2)
    deleted: list[bool] = []
    tensor.__class__ = type("Watched", (torch.Tensor,), {"__del__": lambda _: deleted.append(True)})
    held.hold(tensor, None)
    del tensor
    assert not deleted
    held.release()
    assert deleted
