"""Ubatches take turns on one thread."""

import contextvars
import gc
from collections.abc import Callable

import greenlet
import pytest
import torch

from vllm_davinci.multistream import (
    Interleave,
    MultistreamError,
    Role,
    StreamPool,
    communicate,
    current_ubatch,
)

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


class Model(torch.nn.Module):
    """Nested modules; each layer calls a collective, here a scaled copy."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = [
            torch.randn(width, width, generator=generator).div(4).to(DEVICE) for _ in range(layers)
        ]
        self.order: list[tuple[int | None, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, weight in enumerate(self.weights):
            partial = x @ weight
            total = torch.empty_like(partial)
            self.order.append((current_ubatch(), layer))
            communicate(lambda total=total, partial=partial: total.copy_(partial).mul_(2.0))
            x = torch.relu(total) + x
        return x


def test_results_equal_serial_forwards(run: Interleave) -> None:
    model = Model()
    parts = [torch.randn(n, 16).to(DEVICE) for n in (5, 9, 1)]
    with torch.inference_mode():
        expected = [model(part) for part in parts]
        results = run.run([lambda part=part: model(part) for part in parts])
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), other.cpu())


def test_ubatches_take_turns_at_each_collective(run: Interleave) -> None:
    model = Model(layers=3)
    parts = [torch.randn(4, 16).to(DEVICE) for _ in range(2)]
    run.run([lambda part=part: model(part) for part in parts])
    assert model.order == [(i, layer) for layer in range(3) for i in (0, 1)]
    assert run.num_switches == 6
    assert current_ubatch() is None


def test_without_a_run_communicate_just_calls() -> None:
    assert communicate(lambda: 5) == 5


def test_the_order_is_the_same_when_one_part_has_fewer_collectives(run: Interleave) -> None:
    seen: list[str] = []

    def part(name: str, count: int) -> str:
        for step in range(count):
            seen.append(f"{name}{step}")
            communicate(lambda: None)
        return name

    assert run.run([lambda: part("a", 1), lambda: part("b", 3)]) == ["a", "b"]
    assert seen == ["a0", "b0", "b1", "b2"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_ends_the_run_with_that_error_and_leaves_nothing(run, failing, at):
    cleaned: list[int] = []

    def part(index: int) -> None:
        try:
            for step in range(4):
                if index == failing and step == at:
                    raise ValueError(f"part {index} at {step}")
                communicate(lambda: None)
        finally:
            cleaned.append(index)

    with pytest.raises(ValueError, match=f"part {failing} at {at}"):
        run.run([lambda: part(0), lambda: part(1)])
    started = {0, 1} if not (failing == 0 and at == 0) else {0}
    assert set(cleaned) == started
    gc.collect()
    greenlets = [o for o in gc.get_objects() if issubclass(type(o), greenlet.greenlet)]
    assert all(o is greenlet.getcurrent() for o in greenlets if o and not o.dead)
    assert run.run([lambda: 1, lambda: 2]) == [1, 2]


def test_each_part_has_the_callers_context_and_its_own_changes(run: Interleave) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("outer")

    def part(name: str) -> list[str]:
        seen = [variable.get()]
        variable.set(name)
        communicate(lambda: None)
        seen.append(variable.get())
        return seen

    assert run.run([lambda: part("a"), lambda: part("b")]) == [["outer", "a"], ["outer", "b"]]
    assert variable.get() == "outer"


def test_on_switch_names_the_part_that_runs(run: Interleave) -> None:
    running: list[int] = []

    def part(index: int) -> None:
        for _ in range(3):
            assert running[-1] == index
            communicate(lambda: None)
            assert running[-1] == index

    run.run([lambda: part(0), lambda: part(1)], running.append)


def test_a_collective_inside_a_python_operator_runs_in_line(run: Interleave) -> None:
    library = torch.library.Library("multistream_test", "FRAGMENT")
    library.define("reduced(Tensor x) -> Tensor")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        communicate(lambda: out.copy_(x))
        return out

    library.impl("reduced", reduced, "CompositeExplicitAutograd")
    x = torch.ones(3).to(DEVICE)
    results = run.run([lambda: torch.ops.multistream_test.reduced(x) for _ in range(2)])
    assert all(torch.equal(result.cpu(), x.cpu()) for result in results)
    assert (run.num_switches, run.num_unswitched) == (0, 2)


def test_an_operator_is_seen_where_an_earlier_step_had_none(run: Interleave) -> None:
    library = torch.library.Library("multistream_later_test", "FRAGMENT")
    library.define("reduced(Tensor x) -> Tensor")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        communicate(lambda: None)
        return x.clone()

    library.impl("reduced", reduced, "CompositeExplicitAutograd")
    x = torch.ones(3).to(DEVICE)

    def deep(depth: int, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if depth:
            deep(depth - 1, call)
        else:
            call(x)

    for depth in (0, 1, 4):
        run.run([lambda: deep(9, reduced)] * 2)
        assert (run.num_switches, run.num_unswitched) == (2, 0)
        # Call depths with the operator: equal to, then below the depth without it.
        part = lambda: deep(9 - depth, torch.ops.multistream_later_test.reduced)  # noqa: B023, E731
        run.run([part] * 2)
        assert (run.num_switches, run.num_unswitched) == (0, 2)


def test_a_run_inside_a_run_is_an_error(run: Interleave) -> None:
    with pytest.raises(MultistreamError, match="one run at a time"):
        run.run([lambda: run.run([lambda: 1])])


def test_only_the_collective_runs_on_the_communication_stream() -> None:
    pool = StreamPool()
    run = Interleave(pool)
    compute = pool.device.current_stream()
    seen: list[tuple[str, bool]] = []

    def part() -> None:
        seen.append(("compute", pool.device.current_stream() == compute))
        communicate(
            lambda: seen.append(
                ("communication", pool.device.current_stream() == pool.stream(Role.COMMUNICATION))
            )
        )
        seen.append(("compute", pool.device.current_stream() == compute))

    run.run([part, part])
    assert all(right for _, right in seen)
    assert pool.created == 1
