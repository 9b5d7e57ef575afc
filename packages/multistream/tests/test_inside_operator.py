"""Whether a torch operator that is implemented in Python lies around whoever asks."""

import threading

import pytest
import torch

from vllm_davinci.multistream import Interleave, communicate, inside_operator
from vllm_davinci.multistream.inside_operator import Depth, WalkedDepth, depth_of_thread


@pytest.fixture(params=["counted", "walked"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Depth:
    if request.param == "walked":
        monkeypatch.setattr(inside_operator, "_offset_of_count", lambda: None)
    return depth_of_thread()


def test_the_interpreters_count_answers_without_a_walk() -> None:
    assert not isinstance(depth_of_thread(), WalkedDepth)


def test_it_is_larger_inside_an_operator_and_as_before_after_it(depth: Depth) -> None:
    library = torch.library.Library("multistream_depth_test", "FRAGMENT")
    library.define("asked(Tensor x) -> Tensor")
    seen: list[int] = []

    def asked(x: torch.Tensor) -> torch.Tensor:
        seen.append(depth.value)
        if len(seen) == 2:
            raise ValueError("planted")
        return x.clone()

    library.impl("asked", asked, "CompositeExplicitAutograd")
    x, outside = torch.ones(3), depth.value
    torch.ops.multistream_depth_test.asked(x)
    with pytest.raises(ValueError, match="planted"):
        torch.ops.multistream_depth_test.asked.default(x)
    asked(x)  # not as an operator
    assert [each > outside for each in seen] == [True, True, False]
    assert depth.value == outside


def test_operators_that_ask_torch_to_compute_are_left_again(depth: Depth) -> None:
    outside, x = depth.value, torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert depth.value == outside


def test_a_thread_has_its_own() -> None:
    seen: list[bool] = []
    outside = depth_of_thread().value

    def ask() -> None:
        depth = depth_of_thread()
        before = depth.value
        assert inside_operator._changed_by_taking_the_lock() is not None
        seen.append(depth.value == before)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [True]
    assert depth_of_thread().value == outside


def test_a_count_that_operators_leave_alone_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside_operator._offset_of_count.cache_clear()
    monkeypatch.setattr(inside_operator, "_changed_by_taking_the_lock", lambda: 0)
    try:
        assert isinstance(depth_of_thread(), WalkedDepth)
    finally:
        inside_operator._offset_of_count.cache_clear()


@pytest.mark.usefixtures("depth")
def test_ubatches_do_not_take_turns_inside(run: Interleave) -> None:
    library = torch.library.Library("multistream_turns_test", "FRAGMENT")
    library.define("reduced(Tensor x) -> Tensor")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        communicate(lambda: None)
        return x.clone()

    library.impl("reduced", reduced, "CompositeExplicitAutograd")
    x = torch.ones(3)

    def part() -> None:
        torch.ops.multistream_turns_test.reduced(x)
        communicate(lambda: None)
        reduced(x)

    run.run([part, part])
    assert (run.num_switches, run.num_unswitched) == (4, 2)
