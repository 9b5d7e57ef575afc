"""Ubatches take turns: the order of each collective's parts, and the waits for it."""

import pytest
import torch

from vllm_davinci.multistream import Interleave, Role, StreamPool, communicate, current_ubatch

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


class Handle:
    """A pending collective that records its events."""

    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name
        seen.append(f"begin {name}")

    def wait(self) -> bool:
        self.seen.append(f"wait {self.name}")
        return True


def test_a_ubatch_waits_for_a_librarys_collective_when_it_resumes(run: Interleave) -> None:
    seen: list[str] = []

    def part(name: str) -> None:
        for step in range(2):
            communicate(lambda step=step: Handle(seen, f"{name}{step}"), on="library")

    run.run([lambda: part("a"), lambda: part("b")])
    assert seen == [
        "begin a0", "begin b0", "wait a0", "begin a1", "wait b0", "begin b1", "wait a1", "wait b1",
    ]  # fmt: skip
    assert run.num_switches == 4


def test_outside_of_a_run_and_inside_an_operator_it_is_waited_for_at_once(run: Interleave) -> None:
    seen: list[str] = []
    communicate(lambda: Handle(seen, "outside"), on="library")
    library = torch.library.Library("multistream_collective_test", "FRAGMENT")
    library.define("reduced(Tensor x) -> Tensor")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        communicate(lambda: Handle(seen, "inside"), on="library")
        return x.clone()

    library.impl("reduced", reduced, "CompositeExplicitAutograd")
    x = torch.ones(3).to(DEVICE)
    run.run([lambda: torch.ops.multistream_collective_test.reduced(x) for _ in range(2)])
    assert seen == ["begin outside", "wait outside", *["begin inside", "wait inside"] * 2]
    assert (run.num_switches, run.num_unswitched) == (0, 2)


def test_a_part_that_is_unwound_waits_for_the_collective_it_is_in(run: Interleave) -> None:
    seen: list[str] = []

    def failing() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run.run([lambda: communicate(lambda: Handle(seen, "a"), on="library"), failing])
    assert seen == ["begin a", "wait a"]


class BrokenHandle(Handle):
    def wait(self) -> bool:
        super().wait()
        raise RuntimeError(f"{self.name} cannot be waited for")


def test_the_first_error_is_raised_and_all_are_unwound_when_unwinding_fails_too(run, caplog):
    seen: list[str] = []

    def failing() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run.run(
            [
                lambda: communicate(lambda: BrokenHandle(seen, "a"), on="library"),
                lambda: communicate(lambda: Handle(seen, "b"), on="library"),
                failing,
            ]
        )
    assert seen == ["begin a", "begin b", "wait a", "wait b"]
    assert "Ubatch 0 raised an error of its own" in caplog.text
    assert "a cannot be waited for" in caplog.text
    run.run([lambda: communicate(lambda: Handle(seen, "c"), on="library") for _ in range(2)])
    assert run.num_switches == 2


def test_an_unwound_part_is_reported_and_resumes_no_other(run: Interleave) -> None:
    seen: list[str] = []
    running: list[int] = []

    def stubborn(name: str) -> None:
        try:
            communicate(lambda: None)
            seen.append(f"{name} went on")
        finally:
            seen.append(f"{name} unwinds as {running[-1]}")
            communicate(lambda: None)
            seen.append(f"{name} communicated")

    def failing() -> None:
        communicate(lambda: None)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run.run([failing, lambda: stubborn("b"), lambda: stubborn("c")], running.append)
    assert seen == ["b unwinds as 1", "c unwinds as 2"]


def test_an_exchange_is_one_switching_point_on_a_stream_of_its_own() -> None:
    pool = StreamPool()
    run = Interleave(pool)
    seen: list[tuple[str, object]] = []

    def part(name: str) -> torch.Tensor:
        x = torch.full((4,), 2.0).to(DEVICE)

        def work() -> torch.Tensor:
            seen.append((f"{name} exchange", pool.device.current_stream()))
            communicate(lambda: Handle([], name), on="library")
            doubled = x * 2
            communicate(lambda: doubled.add_(1))
            return doubled

        result = communicate(work, on="exchange")
        seen.append((f"{name} goes on", pool.device.current_stream()))
        return result * 3

    compute = pool.device.current_stream()
    results = run.run([lambda: part("a"), lambda: part("b")])
    assert [name for name, _ in seen] == ["a exchange", "b exchange", "a goes on", "b goes on"]
    assert run.num_switches == 2
    assert [result.cpu().tolist() for result in results] == [[15.0] * 4] * 2
    share = pool.stream(Role.EXCHANGE)
    assert [stream == share for _, stream in seen] == [True, True, False, False]
    assert seen[2][1] == compute
    assert communicate(lambda: 5, on="exchange") == 5


def test_an_error_in_an_exchange_does_not_affect_the_next_run(run: Interleave) -> None:
    def failing() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        run.run([lambda: communicate(failing, on="exchange"), lambda: communicate(lambda: None)])
    run.run([lambda: communicate(lambda: None) for _ in range(2)])
    assert run.num_switches == 2


def test_a_second_exchange_comes_before_the_others_next_collective() -> None:
    pool = StreamPool()
    running: list[int] = []
    run = Interleave(pool)
    compute = pool.device.current_stream()
    seen: list[str] = []

    def part(index: int) -> torch.Tensor:
        def note(what: str, stream: object = compute) -> None:
            assert (pool.device.current_stream(), running[-1]) == (stream, index), what
            seen.append(f"{what}{index}")

        x = torch.full((4,), 2.0).to(DEVICE)
        aside = pool.stream(Role.COMMUNICATION)

        def count() -> int:
            note("count", aside)
            communicate(lambda: None)  # nested, so no turn
            return 4

        def move(size: int) -> tuple[torch.Tensor, int]:
            note("move", aside)
            communicate(lambda: Handle([], "rows"), on="library")  # nested, so no turn
            return x[:size] * 3, size

        note("attention")
        rows, size = communicate(count, then=move)
        note("experts")
        assert size == 4
        total = rows + 1
        communicate(lambda: Handle([], "combine"), on="library")
        note("end")
        return total

    results = run.run([lambda: part(0), lambda: part(1)], running.append)
    # The host waits for an ubatch's sizes only after another ubatch has work; rows never wait for a
    # later ubatch's collective.
    assert seen == [
        "attention0", "count0", "attention1", "move0", "count1", "experts0", "move1",
        "experts1", "end0", "end1",
    ]  # fmt: skip
    assert [result.cpu().tolist() for result in results] == [[7.0] * 4] * 2
    assert (run.num_switches, run.num_unswitched) == (4, 0)


def test_a_second_exchange_runs_even_if_no_other_part_communicates(run: Interleave) -> None:
    seen: list[str] = []

    def first() -> int:
        return communicate(lambda: seen.append("count"), then=lambda _: seen.append("move") or 5)

    assert run.run([first, lambda: seen.append("other")]) == [5, None]
    assert seen == ["count", "other", "move"]
    assert communicate(lambda: 2, then=lambda size: size + 1) == 3


@pytest.mark.parametrize("failing", ["count", "move", "other"])
def test_an_error_around_a_second_exchange_leaves_nothing(run: Interleave, failing: str) -> None:
    moved: list[str] = []

    def step(name: str) -> None:
        if name == failing:
            raise ValueError(f"planted in {name}")
        moved.append(name)

    def other() -> None:
        step("other")
        communicate(lambda: None)

    with pytest.raises(ValueError, match=f"planted in {failing}"):
        run.run([lambda: communicate(lambda: step("count"), then=lambda _: step("move")), other])
    assert moved == {"count": [], "move": ["count", "other"], "other": ["count"]}[failing]
    assert run.run([lambda: communicate(lambda: 1) for _ in range(2)]) == [1, 1]
    assert moved[-1:] != ["move"]


def test_a_deferred_collective_yields_to_no_other_part(run: Interleave) -> None:
    seen: list[str] = []

    def forward() -> None:
        name = f"ubatch {current_ubatch()}'s"
        handles: list[Handle] = []

        def begin() -> Handle:
            handles.append(Handle(seen, f"{name} first"))
            return handles[0]

        communicate(begin, on="library", waits=False)
        seen.append(f"compute {name}")
        communicate(lambda: Handle(seen, f"{name} second"), on="library")
        handles[0].wait()

    run.run([forward, forward])
    names = ["ubatch 0's", "ubatch 1's"]
    launched = [(f"begin {n} first", f"compute {n}", f"begin {n} second") for n in names]
    waited = [(f"wait {n} second", f"wait {n} first") for n in names]
    assert seen == [event for events in launched + waited for event in events]
    assert run.num_switches == 2


def test_outside_of_ubatches_a_deferred_collective_is_waited_for_at_once() -> None:
    seen: list[str] = []
    communicate(lambda: Handle(seen, "first"), on="library", waits=False)
    assert seen == ["begin first", "wait first"]
