"""Concurrent streams, and the profile of a step with overlap."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.settings import Settings
from vllm_davinci.verify.trace import PROFILE, busy_together, tasks_of

REPETITIONS = 8


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    yield Case("streams/order", _order)
    yield Case("streams/graph", _graph)
    yield Case("streams/side by side", _side_by_side)
    for path in settings.checkpoints:
        checkpoint = Path(path).name
        yield Case(
            f"streams/trace of {checkpoint}",
            lambda name=checkpoint: _traced(name, directory / PROFILE / name),  # type: ignore[misc]
        )


def _order() -> Iterator[Finding]:
    """Checks that a stream that waits for another one sees its writes."""
    device = Device()
    torch = device.torch
    x = torch.ones(1024, 1024, device="npu")
    side = torch.npu.Stream()
    for _ in range(REPETITIONS):
        x = x + 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x = x * 2
        torch.npu.current_stream().wait_stream(side)
    expected = 1.0
    for _ in range(REPETITIONS):
        expected = (expected + 1) * 2
    seen = float(x[-1, -1])
    yield Finding("streams/order", seen, passed=seen == expected)


def _graph() -> Iterator[Finding]:
    """Captures a graph of two streams once and replays it."""
    device = Device()
    torch = device.torch
    x, graph, side = torch.ones(64, device="npu"), torch.npu.NPUGraph(), torch.npu.Stream()
    y = torch.zeros_like(x)
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        x.add_(1)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y.copy_(x * 2)
        torch.npu.current_stream().wait_stream(side)
    for _ in range(3):
        graph.replay()
    torch.npu.synchronize()
    seen = [float(x[0]), float(y[0])]
    yield Finding("streams/graph", seen, passed=seen == [4.0, 8.0])


def _side_by_side() -> Iterator[Finding]:
    """Runs copies to the host concurrently with products; reports their time relative to serial
    time.
    """
    device = Device()
    if not device.has_times:
        return
    torch = device.torch
    a = torch.ones(2048, 2048, device="npu", dtype=torch.bfloat16)
    source = torch.ones(16 << 20, device="npu", dtype=torch.uint8)
    target = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
    side = torch.npu.Stream()

    def compute() -> None:
        for _ in range(REPETITIONS):
            a @ a

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def both() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            copy()
        compute()
        torch.npu.current_stream().wait_stream(side)

    def in_turn() -> None:
        copy()
        compute()

    yield from _ratio(device, in_turn, both)


def _ratio(
    device: Device, in_turn: Callable[[], None], both: Callable[[], None]
) -> Iterator[Finding]:
    both()
    alone, together = device.seconds_of(in_turn), device.seconds_of(both)
    name = "streams/side by side"
    yield Finding(f"{name}/in turn", round(alone * 1e6, 3), Kind.FIGURE, "us")
    yield Finding(f"{name}/together", round(together * 1e6, 3), Kind.FIGURE, "us")


def _traced(checkpoint: str, directory: Path) -> Iterator[Finding]:
    """Findings about a profile: times by the profiler, and the number of tasks."""
    name = f"streams/trace of {checkpoint}"
    tasks = tasks_of(directory)
    if not tasks:
        message = f"no trace_view.json below {directory}: run the part `tokens` first"
        yield Finding(name, "no profile", passed=False, details={"message": message})
        return
    streams = Counter(task.stream for task in tasks)
    some, several = busy_together(tasks)
    yield Finding(f"{name}/streams", len(streams), details={"tasks by stream": dict(streams)})
    yield Finding(f"{name}/tasks", len(tasks), Kind.NOTE)
    if Device().has_times:
        share = round(several / some, 4) if some else 0.0
        yield Finding(f"{name}/several streams busy", share, Kind.NOTE, "share")
