"""Costs of the device and its runtime: launches, events, copies, memory, products, attention.

All times are between two events on the device's clock; the device is idle before. They include the
host's launches if those take longer than the work. In a graph the host launches once, so that only
the device's time remains.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.measured_sizes import (
    ATTENTION_TOKENS,
    CACHED_MIB,
    COPY_MIB,
    MEMORY_MIB,
    PRODUCT_SIZES,
)
from vllm_davinci.verify.settings import Settings

MANY = 200
TRIES = 3
HEADS, HEAD_SIZE = 32, 128
NO_TIMES = (
    "this virtual NPU models no time: use `vnpu run --chip NAME -- vllm-davinci verify`; `vnpu "
    "machines` lists chips"
)


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    device = Device()
    if not device.has_times:
        yield Case("costs", lambda: [Finding("costs", NO_TIMES, Kind.NOTE)])
        return
    for name, measure in (
        ("launches", _launches),
        ("events", _events),
        ("copies", _copies),
        ("memory", _memory),
        ("products", _products),
        ("attention", _attention),
    ):
        yield Case(f"costs/{name}", lambda measure=measure: measure(device))  # type: ignore[misc]


def _us(name: str, seconds: float) -> Finding:
    return Finding(f"costs/{name}", round(seconds * 1e6, 4), Kind.FIGURE, "us")


def _rate(name: str, amount: float, seconds: float, unit: str) -> Finding:
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12, "TOP/s": 1e12}[unit]
    details = {"seconds": seconds, "amount": amount}
    value = float(f"{amount / seconds / scale:.6g}")
    return Finding(f"costs/{name}", value, Kind.FIGURE, unit, details=details)


def _best(device: Device, work: Callable[[], object], repetitions: int = 1) -> float:
    """The shortest of several tries after a warm-up."""
    work()
    return min(device.seconds_of(work, repetitions) for _ in range(TRIES))


def _in_a_graph(device: Device, work: Callable[[], object], count: int) -> float:
    """Seconds per call in a graph, from replays of `count` and of twice as many calls."""
    torch = device.torch
    work()
    torch.npu.synchronize()
    seconds = []
    for calls in (count, 2 * count):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            for _ in range(calls):
                work()
        seconds.append(_best(device, graph.replay))
    return (seconds[1] - seconds[0]) / count


def _launches(device: Device) -> Iterator[Finding]:
    torch = device.torch
    x = torch.ones(16, 16, device="npu", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def add() -> None:
        x.add_(1)

    def multiply() -> None:
        torch.mm(x, x, out=out)

    yield _us("launches/element-wise operator", _best(device, add, MANY))
    yield _us("launches/product", _best(device, multiply, MANY))
    yield _us("launches/element-wise operator in a graph", _in_a_graph(device, add, MANY))
    yield _us("launches/product in a graph", _in_a_graph(device, multiply, MANY))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        add()
    yield _us("launches/graph of one operator", _best(device, graph.replay, MANY))


def _events(device: Device) -> Iterator[Finding]:
    torch = device.torch
    x, side = torch.ones(16, device="npu"), torch.npu.Stream()
    main = torch.npu.current_stream()
    event = torch.npu.Event()

    def hand_over_and_back() -> None:
        current = torch.npu.current_stream()
        side.wait_stream(current)
        with torch.npu.stream(side):
            x.add_(1)
        current.wait_stream(side)

    yield _us("events/record", _best(device, lambda: event.record(main), MANY))
    yield _us("events/synchronize", _best(device, torch.npu.synchronize, MANY))
    yield _us("events/hand over to a stream and back", _best(device, hand_over_and_back, MANY))
    in_graph = _in_a_graph(device, hand_over_and_back, MANY // 4)
    yield _us("events/hand over to a stream and back in a graph", in_graph)


def _copies(device: Device) -> Iterator[Finding]:
    torch = device.torch
    for mib in COPY_MIB:
        on_host = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(mib << 20, dtype=torch.uint8, device="npu")
        into = _best(device, partial(there.copy_, on_host, non_blocking=True))
        back = _best(device, partial(on_host.copy_, there, non_blocking=True))
        yield _rate(f"copies/to the device, {mib} MiB", mib << 20, into, "GB/s")
        yield _rate(f"copies/to the host, {mib} MiB", mib << 20, back, "GB/s")
    small = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(64, dtype=torch.uint8, device="npu")
    period = _best(device, lambda: there.copy_(small, non_blocking=True), MANY)
    yield _us("copies/of 64 bytes to the device", period)


def _memory(device: Device) -> Iterator[Finding]:
    """Measures copies in memory; bytes read and written both count."""
    torch = device.torch
    for mib in MEMORY_MIB:
        source = torch.empty(mib << 20, dtype=torch.uint8, device="npu")
        target = torch.empty_like(source)
        seconds = _best(device, partial(target.copy_, source), 4)
        yield _rate(f"memory/copy of {mib} MiB", 2 * (mib << 20), seconds, "GB/s")
    source = torch.empty(CACHED_MIB << 20, dtype=torch.uint8, device="npu")
    target = torch.empty_like(source)
    seconds = _in_a_graph(device, lambda: target.copy_(source), 50)
    yield _rate(
        f"memory/copy of {CACHED_MIB} MiB in cache", 2 * (CACHED_MIB << 20), seconds, "GB/s"
    )


def _products(device: Device) -> Iterator[Finding]:
    torch = device.torch
    for name, dtype in (
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float32", torch.float32),
    ):
        for size in PRODUCT_SIZES:
            a, b = (torch.zeros(size, size, device="npu", dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = _best(device, partial(torch.mm, a, b, out=out), 4)
            yield _rate(f"products/{name}, {size} x {size} x {size}", 2 * size**3, seconds,
                        "TFLOP/s")  # fmt: skip
    yield from _integer_products(device)
    rows, depth = 16, 7168
    x = torch.zeros(rows, depth, device="npu", dtype=torch.bfloat16)
    weights = [torch.zeros(depth, depth, device="npu", dtype=torch.bfloat16) for _ in range(4)]

    def decode() -> None:
        for weight in weights:
            x @ weight

    seconds = _best(device, decode) / len(weights)
    yield _rate(f"products/bfloat16, {rows} x {depth} x {depth}", 2 * depth**2, seconds, "GB/s")


def _integer_products(device: Device) -> Iterator[Finding]:
    import torch_npu

    torch = device.torch
    for size in PRODUCT_SIZES:
        a, b = (torch.zeros(size, size, device="npu", dtype=torch.int8) for _ in range(2))
        scale, rows = (torch.ones(size, device="npu") for _ in range(2))

        def multiply(a: Any = a, b: Any = b, scale: Any = scale, rows: Any = rows) -> None:
            torch_npu.npu_quant_matmul(
                a, b, scale, pertoken_scale=rows, output_dtype=torch.bfloat16
            )

        seconds = _best(device, multiply, 4)
        yield _rate(f"products/int8, {size} x {size} x {size}", 2 * size**3, seconds, "TOP/s")


def _attention(device: Device) -> Iterator[Finding]:
    """Measures a causal prefill; counts operations on visible keys only."""
    import torch_npu

    torch = device.torch
    mask = torch.ones(2048, 2048, dtype=torch.int8, device="npu").triu(1)
    for tokens in ATTENTION_TOKENS:
        q, k, v = (
            torch.zeros(tokens, HEADS, HEAD_SIZE, device="npu", dtype=torch.bfloat16)
            for _ in range(3)
        )

        def attend(q: Any = q, k: Any = k, v: Any = v, tokens: int = tokens) -> None:
            torch_npu.npu_fused_infer_attention_score(
                q, k, v, atten_mask=mask, actual_seq_lengths=[tokens],
                actual_seq_lengths_kv=[tokens], num_heads=HEADS, num_key_value_heads=HEADS,
                scale=0.1, input_layout="TND", sparse_mode=3,
            )  # fmt: skip

        seconds = _best(device, attend, 2)
        operations = 2 * 2 * HEADS * HEAD_SIZE * tokens * (tokens + 1) / 2
        yield _rate(f"attention/prefill of {tokens} tokens", operations, seconds, "TFLOP/s")
