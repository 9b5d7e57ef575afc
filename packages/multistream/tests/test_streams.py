"""Waits between streams, on a device that records them."""

from typing import Any

import pytest

from vllm_davinci.multistream import EventPool, Fork, Interleave, Role, StreamPool, communicate


def fails() -> None:
    raise ValueError("planted")


def test_a_collective_waits_for_its_ubatch_which_waits_for_it_as_late_as_possible(device):
    def part(name: str) -> None:
        device.work(f"product {name}")
        communicate(lambda: device.work(f"sum {name}"))
        device.work(f"norm {name}")

    Interleave(StreamPool(device)).run([lambda: part("a"), lambda: part("b")])
    assert device.log == [
        "product a on main", "event1 marks main", "side1 waits for event1", "sum a on side1",
        "event2 marks side1",
        "product b on main", "event3 marks main", "side1 waits for event3", "sum b on side1",
        "event4 marks side1",
        "main waits for event2", "norm a on main",
        "main waits for event4", "norm b on main",
    ]  # fmt: skip


@pytest.mark.parametrize("on", ["communication", "exchange"])
def test_after_a_failed_launch_the_main_stream_waits_for_what_it_began(device, on: Any):
    def begins_and_fails() -> None:
        device.work("half a sum")
        fails()

    run = Interleave(StreamPool(device))
    with pytest.raises(ValueError, match="planted"):
        run.run([lambda: communicate(begins_and_fails, on), lambda: None])
    assert device.log[-3:] == [
        "half a sum on side2" if on == "exchange" else "half a sum on side1",
        "event2 marks side2" if on == "exchange" else "event2 marks side1",
        "main waits for event2",
    ]
    assert device.current_stream() is device.main


def test_rows_of_known_number_wait_only_for_their_own_ubatch(device):
    def part(name: str) -> None:
        device.work(f"choice {name}")
        communicate(
            lambda: device.work(f"counts {name}"), then=lambda _: device.work(f"rows {name}")
        )
        device.work(f"experts {name}")

    Interleave(StreamPool(device)).run([lambda: part("a"), lambda: part("b")])
    assert device.log == [
        "choice a on main", "event2 marks main", "side1 waits for event2", "counts a on side1",
        "event3 marks side1",
        "choice b on main", "rows a on side1", "event1 marks side1",
        "event5 marks main", "side1 waits for event5", "counts b on side1", "event6 marks side1",
        "main waits for event3", "main waits for event1", "experts a on main",
        "main waits for event6", "rows b on side1", "event4 marks side1",
        "main waits for event4", "experts b on main",
    ]  # fmt: skip


@pytest.mark.parametrize("fails_in", ["counts", "rows"])
def test_after_a_failed_exchange_of_rows_the_main_stream_waits_for_it(device, fails_in):
    def counts() -> None:
        device.work("counts")
        if fails_in == "counts":
            fails()

    def rows(_: None) -> None:
        device.work("half of the rows")
        fails()

    run = Interleave(StreamPool(device))
    with pytest.raises(ValueError, match="planted"):
        run.run([lambda: communicate(counts, then=rows), lambda: communicate(lambda: None)])
    last = "event3" if fails_in == "counts" else "event1"
    assert device.log[-1] == f"main waits for {last}"
    assert f"{last} marks side1" in device.log
    assert device.current_stream() is device.main


def test_a_ubatch_that_is_unwound_waits_for_its_collective(device):
    run = Interleave(StreamPool(device))
    with pytest.raises(ValueError, match="planted"):
        run.run([lambda: communicate(lambda: device.work("sum")), fails])
    assert device.log[-3:] == ["sum on side1", "event2 marks side1", "main waits for event2"]


def test_a_fork_waits_for_the_main_stream_and_the_join_for_the_fork(device):
    pool = StreamPool(device)
    with Fork(pool, EventPool(device), Role.VECTOR) as fork:
        device.work("down")
        fork.run(lambda: device.work("norm"))
        device.work("up")
        fork.join()
        device.work("attend")
    assert device.log == [
        "down on main", "event1 marks main", "side1 waits for event1", "norm on side1",
        "up on main", "event2 marks side1", "main waits for event2", "attend on main",
    ]  # fmt: skip


def test_a_fork_whose_work_fails_is_joined(device):
    with (
        pytest.raises(ValueError, match="planted"),
        Fork(StreamPool(device), EventPool(device), Role.VECTOR) as fork,
    ):
        fork.run(fails)
    assert device.log[-2:] == ["event2 marks side1", "main waits for event2"]
    assert device.current_stream() is device.main


def test_events_are_used_again_in_the_next_step(device):
    events = EventPool(device)
    first = [events.take(), *events.take_pair()]
    events.begin_step()
    assert [*events.take_pair(), events.take()] == first
    assert events.allocated == 3


def test_new_streams_are_reported_once_by_role(device):
    told: list[tuple[Role, object]] = []
    pool = StreamPool(device, lambda role, stream: told.append((role, stream)))
    streams = [pool.stream(role) for role in (Role.COPY, Role.COMPUTE, Role.COPY, Role.VECTOR)]
    assert told == [(Role.COPY, streams[0]), (Role.VECTOR, streams[3])]
    assert streams[1] is device.main
