"""Random steps on torch's accelerator: interleaved ubatches give the bits of serial ones.

Matrix products slow side streams down, so that a missing wait leads to reads of early values or
reused memory. Numbers are small integers, so results do not depend on the order of additions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from vllm_davinci.multistream import EventPool, Fork, Interleave, Role, StreamPool, communicate
from vllm_davinci.multistream.device import Event, Stream

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
HIDDEN = 64
# Size of a delaying product: on a GPU it takes longer than launching the work that must wait.
DELAY = 3072 if DEVICE.type == "cuda" else 16
STEPS = 4
LAYERS = 12

Operation = Callable[["Model", torch.Tensor], torch.Tensor]


class Work:
    """Replaces torch.distributed's handle of work on a library's stream."""

    def __init__(self, model: Model, launch: Callable[[], None]) -> None:
        device, current = model.streams.device, model.streams.device.current_stream()
        stream, begin = model.streams.stream(Role.COPY), device.new_event()
        begin.record(current)
        stream.wait_event(begin)
        device.set_stream(stream)
        try:
            launch()
        finally:
            device.set_stream(current)
        self._device, self._end = device, device.new_event()
        self._end.record(stream)

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._end)


@dataclass
class Model:
    """weight: a permutation, so that numbers stay small; slow, scratch: memory for delays"""

    streams: StreamPool
    events: EventPool
    weight: torch.Tensor
    slow: torch.Tensor
    scratch: dict[Stream, torch.Tensor]

    @classmethod
    def make(cls) -> Model:
        streams = StreamPool()
        generator = torch.Generator().manual_seed(1)
        weight = torch.eye(HIDDEN)[torch.randperm(HIDDEN, generator=generator)].to(DEVICE)
        slow = torch.ones(DELAY, DELAY, device=DEVICE)
        return cls(streams, EventPool(streams.device), weight, slow, {})

    def delay(self) -> None:
        stream = self.streams.device.current_stream()
        if stream not in self.scratch:
            self.scratch[stream] = torch.empty_like(self.slow)
        torch.mm(self.slow, self.slow, out=self.scratch[stream])


def compute(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x @ model.weight + 1.0, 7.0)


def reduce(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def launch() -> None:
        model.delay()
        torch.add(x, 3.0, out=out)

    communicate(launch)
    return torch.remainder(out, 5.0)


def reduce_by_a_library(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def launch() -> None:
        model.delay()
        torch.mul(x, 2.0, out=out)

    communicate(lambda: Work(model, launch), on="library")
    return torch.remainder(out, 5.0)


def reduce_later(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    begun: list[Work] = []

    def begin() -> Work:
        begun.append(Work(model, lambda: (model.delay(), torch.add(x, 2.0, out=out))[0]))
        return begun[0]

    communicate(begin, on="library", waits=False)
    other = compute(model, reduce_by_a_library(model, x))
    begun[0].wait()
    return torch.remainder(other + out, 7.0)


def send_and_fetch(model: Model, x: torch.Tensor) -> torch.Tensor:
    def work() -> list[torch.Tensor]:
        sent = torch.empty_like(x)

        def launch() -> None:
            model.delay()
            torch.add(x, 1.0, out=sent)

        communicate(launch)
        between = torch.remainder(sent @ model.weight, 3.0)
        model.delay()
        return [between + 1.0, between]

    first, second = communicate(work, on="exchange")
    return first + second


def send_counted_rows(model: Model, x: torch.Tensor, is_used_late: bool = False) -> torch.Tensor:
    def count() -> tuple[torch.Tensor, Event, torch.Tensor]:
        model.delay()
        chosen = x[:, 0] > 2.0
        number = chosen.sum()
        on_host = torch.empty_like(number, device="cpu", pin_memory=DEVICE.type != "cpu")
        on_host.copy_(number, non_blocking=True)
        counted = model.streams.device.new_event()
        counted.record(model.streams.device.current_stream())
        return on_host, counted, torch.argsort(chosen, descending=True, stable=True)

    def move(counts: tuple[torch.Tensor, Event, torch.Tensor]) -> torch.Tensor:
        on_host, counted, order = counts
        counted.synchronize()
        if not is_used_late:
            model.delay()
        return x[order[: int(on_host)]].sum(dim=0, keepdim=True)

    rows = communicate(count, then=move)
    if is_used_late:
        model.delay()
    return torch.remainder(x + rows, 7.0)


def use_counted_rows_late(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Sends the next rows, into other memory, before these rows have been used."""
    return send_counted_rows(model, x, is_used_late=True)


def side_stream(model: Model, x: torch.Tensor) -> torch.Tensor:
    def work(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.delay()
        return y + 1.0, torch.remainder(y, 2.0)

    with Fork(model.streams, model.events, Role.VECTOR) as fork:
        added, parity = fork.run(work, x * 2.0)
        main = x @ model.weight
        fork.join()
        return torch.remainder(main + added + parity, 7.0)


CAPTURABLE: tuple[Operation, ...] = (
    compute,
    reduce,
    reduce_by_a_library,
    reduce_later,
    send_and_fetch,
    side_stream,
)
OPERATIONS = (*CAPTURABLE, send_counted_rows, use_counted_rows_late)


def forward(model: Model, operations: list[Operation], x: torch.Tensor) -> torch.Tensor:
    for operation in operations:
        x = operation(model, x)
        # Overwrites memory that was released too early.
        torch.full_like(x, 1000.0)
    return x


def random_input(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 7, (rows, HIDDEN), generator=generator).float().to(DEVICE)


@pytest.mark.parametrize("ubatches", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_interleaved_ubatches_equal_serial_ones(seed: int, ubatches: int) -> None:
    chosen = random.Random(seed)
    operations = [chosen.choice(OPERATIONS) for _ in range(LAYERS)]
    if seed == 0:
        operations = [use_counted_rows_late] * LAYERS
    model = Model.make()
    interleave = Interleave(model.streams)
    for step in range(STEPS):
        rows = [chosen.randrange(1, HIDDEN) for _ in range(ubatches)]
        inputs = [random_input(number, seed * STEPS + step) for number in rows]
        model.events.begin_step()
        expected = [forward(model, operations, x).cpu() for x in inputs]
        model.events.begin_step()
        found = interleave.run([lambda x=x: forward(model, operations, x) for x in inputs])
        # Clone before the host waits, when only the compute stream orders reads.
        found = [x.clone() for x in found]
        for index, (left, right) in enumerate(zip(expected, found, strict=True)):
            names = [operation.__name__ for operation in operations]
            assert torch.equal(left, right.cpu()), f"ubatch {index}, step {step}, {names}"
        assert interleave.num_switches > 0


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the host has no graphs")
@pytest.mark.parametrize("seed", range(3))
def test_a_graph_of_interleaved_ubatches_replays_with_other_numbers(seed: int) -> None:
    chosen = random.Random(seed)
    operations = [chosen.choice(CAPTURABLE) for _ in range(LAYERS)]
    model = Model.make()
    interleave = Interleave(model.streams)
    inputs = [random_input(HIDDEN, 0) for _ in range(2)]
    outputs: list[torch.Tensor] = []

    def in_turn() -> None:
        model.events.begin_step()
        outputs[:] = interleave.run([lambda x=x: forward(model, operations, x) for x in inputs])

    in_turn()
    torch.accelerator.synchronize()
    module = torch.get_device_module(DEVICE)
    graph = (module.NPUGraph if DEVICE.type == "npu" else module.CUDAGraph)()
    with module.graph(graph):
        in_turn()
    captured = list(outputs)
    for step in range(STEPS):
        for index, x in enumerate(inputs):
            x.copy_(random_input(HIDDEN, 2 * step + index))
        model.events.begin_step()
        expected = [forward(model, operations, x).cpu() for x in inputs]
        graph.replay()
        found = [x.cpu() for x in captured]
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left, right), [operation.__name__ for operation in operations]
