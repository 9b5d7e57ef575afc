"""Interleaves two ubatches on any accelerator of torch, with copies as communication.

Each layer multiplies the hidden states several times, then copies them to the host and back in
place of a collective; a copy engine does this concurrently with products. The ubatches run
serially, then interleaved, and both orders give the same bits. The bound is the longer of all
products alone and all copies alone. Needs torch, rich and the multistream package, but no vLLM. A
virtual NPU's times mean nothing, but its equal bits do. The default sizes suit a small test; a GPU
needs larger ones to be busy.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from result import Kind, Result, Row
from vllm_davinci.multistream import Interleave, StreamPool, communicate

SEED = 0
UBATCHES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=256, help="tokens of both ubatches")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--products", type=int, default=4, help="matrix products per layer")
    parser.add_argument("--repetitions", type=int, default=15)


@dataclass
class Model:
    """weights: products of (hidden, hidden); staging: host memory of each ubatch's copies"""

    weights: list[torch.Tensor]
    layers: int
    staging: list[torch.Tensor]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x

    def move(self, x: torch.Tensor, ubatch: int) -> torch.Tensor:
        """Copies to the host and back: (tokens, hidden), into new memory of the compute stream."""
        moved = torch.empty_like(x)

        def launch() -> None:
            self.staging[ubatch].copy_(x, non_blocking=True)
            moved.copy_(self.staging[ubatch], non_blocking=True)

        communicate(launch)
        return moved

    def forward(self, x: torch.Tensor, ubatch: int) -> torch.Tensor:
        for _ in range(self.layers):
            x = self.move(self.compute(x), ubatch)
        return x


def _times_ms(action: Callable[[], object], repetitions: int) -> list[float]:
    """Times an action by the device's events, after a warm-up."""
    action()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.Event(enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize()
        begin.record()
        action()
        end.record()
        torch.accelerator.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _captured(device: torch.device, action: Callable[[], object]) -> Callable[[], object] | None:
    """Captures an action; returns a function that replays it, or None if the device has no
    graphs.
    """
    module = torch.get_device_module(device)
    graph_class = getattr(module, "CUDAGraph", None) or getattr(module, "NPUGraph", None)
    if graph_class is None:
        return None
    graph = graph_class()
    torch.accelerator.synchronize()
    with module.graph(graph):
        action()
    replay: Callable[[], object] = graph.replay
    return replay


def _measure(model: Model, inputs: list[torch.Tensor], repetitions: int) -> dict[str, list[float]]:
    """Returns milliseconds of both orders and of their parts. Checks that both give the same
    bits.
    """
    outputs: dict[str, list[torch.Tensor]] = {}
    interleave = Interleave(StreamPool())

    def serial() -> None:
        outputs["serial"] = [model.forward(x, index) for index, x in enumerate(inputs)]

    def in_turn() -> None:
        outputs["in turn"] = interleave.run(
            [lambda x=x, i=i: model.forward(x, i) for i, x in enumerate(inputs)]  # type: ignore[misc]
        )

    def products() -> None:
        for x in inputs:
            for _ in range(model.layers):
                x = model.compute(x)

    def copies() -> None:
        for index, x in enumerate(inputs):
            for _ in range(model.layers):
                x = model.move(x, index)

    times = {
        name: _times_ms(action, repetitions)
        for name, action in (
            ("products", products), ("copies", copies), ("serial", serial), ("in turn", in_turn),
        )
    }  # fmt: skip
    _require_equal(outputs["serial"], outputs["in turn"], "in turn")
    replay = _captured(inputs[0].device, in_turn)
    if replay is not None:
        in_graph = outputs["in turn"]
        for x in in_graph:
            x.zero_()
        times["replayed"] = _times_ms(replay, repetitions)
        _require_equal(outputs["serial"], in_graph, "a replayed graph")
    return times


def _rows(times: dict[str, list[float]]) -> Iterator[Row]:
    median = {name: statistics.median(each) for name, each in times.items()}
    bound = max(median["products"], median["copies"])
    for name in ("in turn", "replayed"):
        if name not in times:
            continue
        low, _, high = statistics.quantiles(times[name], n=4)
        yield Row(
            name=f"ubatches {name}" + (" from a graph" if name == "replayed" else ""),
            unit="ms",
            ours=median[name],
            baseline=median["serial"],
            bound=bound,
            kind=Kind.MEASURED,
            quartiles=(low, high),
            note=f"{bound / median[name]:.1%} of the bound",
        )
    for name in ("products", "copies"):
        yield Row(name=f"{name} alone", unit="ms", ours=median[name], kind=Kind.MEASURED)


def run(args: argparse.Namespace) -> Result:
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        raise SystemExit("multistream/copy_engine needs an accelerator: torch finds none here.")
    torch.manual_seed(SEED)
    rows = args.tokens // UBATCHES
    scale = args.hidden**-0.5
    model = Model(
        [
            (torch.randn(args.hidden, args.hidden) * scale).to(device, torch.bfloat16)
            for _ in range(args.products)
        ],
        args.layers,
        [
            torch.empty(rows, args.hidden, dtype=torch.bfloat16, pin_memory=True)
            for _ in range(UBATCHES)
        ],
    )
    inputs = [torch.randn(rows, args.hidden).to(device, torch.bfloat16) for _ in range(UBATCHES)]
    return Result(
        ours="ubatches in turn (vllm_davinci.multistream)",
        baseline="the same ubatches one after the other",
        rows=list(_rows(_measure(model, inputs, args.repetitions))),
        settings={"ubatches": UBATCHES, "dtype": "bfloat16"},
        seed=SEED,
        device=torch.get_device_module(device).get_device_name(),
        bounded_by="the longer of all products and all copies, each alone, in the same run",
    )


def _require_equal(expected: list[torch.Tensor], found: list[torch.Tensor], way: str) -> None:
    for index, (left, right) in enumerate(zip(expected, found, strict=True)):
        if not torch.equal(left, right):
            different = int((left != right).sum())
            raise SystemExit(
                f"ubatch {index} {way} differs in {different} of {left.numel()} values from the "
                "same ubatch alone: work of two streams is not ordered as it must be."
            )
