"""What switch.py measures, in one process: `switch_process.py HAND_OVERS STEPS LAYERS`."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import greenlet
import torch
import torch.distributed as dist
import torch_npu
from vllm.forward_context import ForwardContext
from vllm.utils import torch_utils
from vllm.v1.worker.ubatching import make_ubatch_contexts

from vllm_davinci.core import torch_cuda_names
from vllm_davinci.multistream import Interleave, StreamPool, collective, communicate

REPETITIONS = 15
LIMIT_S = 60
DEPTH = 20  # Python frames between a model's root and its collectives, as in vLLM's models
HIDDEN = 512
TOKENS = 64


def _times_us(action: Callable[[], object], count: int, per: int) -> list[float]:
    """Microseconds per `per`-th of an action, `count` times, after one that is not counted."""
    action()
    times = []
    for _ in range(count):
        torch.npu.synchronize()
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) / per * 1e6)
    return times


def _at_depth(depth: int, call: Callable[[], None]) -> None:
    if depth:
        _at_depth(depth - 1, call)
    else:
        call()


def hand_overs(count: int) -> list[float]:
    """Two micro-batches that do nothing but take turns."""
    run = Interleave(StreamPool())
    nothing = lambda: None  # noqa: E731

    def turns() -> None:
        for _ in range(count // 2):
            communicate(nothing)

    def body() -> None:
        _at_depth(DEPTH, turns)

    return _times_us(lambda: run.run([body, body]), REPETITIONS, count)


def vllm_hand_overs(count: int) -> list[float]:
    """The same with vLLM's contexts: one thread per micro-batch."""
    compute, communication = torch.npu.current_stream(), torch.npu.Stream()
    contexts_of_step = [
        ForwardContext(no_compile_layers={}, attn_metadata={"half": index}, slot_mapping={})
        for index in range(2)
    ]

    def step() -> None:
        barrier = threading.Barrier(3)
        contexts = make_ubatch_contexts(2, compute, communication, contexts_of_step, barrier)

        def turns(context: Any) -> None:
            torch.npu.set_device(0)
            with context:
                for _ in range(count // 4):
                    context.yield_and_switch_from_compute_to_comm()
                    context.yield_and_switch_from_comm_to_compute()

        with ThreadPoolExecutor(2) as threads:
            halves = [
                threads.submit(_at_depth, DEPTH, lambda c=context: turns(c)) for context in contexts
            ]
            barrier.wait()
            contexts[0].cpu_wait_event.set()
            for half in halves:
                half.result(LIMIT_S)

    return _times_us(step, REPETITIONS, count)


def collectives_with_hand_overs(count: int) -> list[float]:
    """Two micro-batches that do nothing but sum a number over ranks, per sum."""
    run = Interleave(StreamPool())
    total = torch.zeros(1).npu()

    def turns() -> None:
        for _ in range(count // 2):
            collective(lambda: dist.all_reduce(total, async_op=True))

    def body() -> None:
        _at_depth(DEPTH, turns)

    return _times_us(lambda: run.run([body, body]), REPETITIONS, count)


def bare_collectives(count: int) -> list[float]:
    """The same sums one after the other."""
    total = torch.zeros(1).npu()

    def turns() -> None:
        for _ in range(count):
            dist.all_reduce(total)

    return _times_us(turns, REPETITIONS, count)


def bare_switches(count: int) -> list[float]:
    """greenlet.switch there and back, per switch."""
    root = greenlet.getcurrent()

    def body() -> None:
        while True:
            root.switch()

    other = greenlet.greenlet(body)

    def turns() -> None:
        for _ in range(count // 2):
            other.switch()

    times = _times_us(turns, REPETITIONS, count)
    other.throw()
    return times


def bare_events(count: int) -> list[float]:
    """Two threads that wake each other with threading.Event, per switch."""
    mine, theirs, stop = threading.Event(), threading.Event(), False

    def body() -> None:
        while True:
            theirs.wait()
            theirs.clear()
            if stop:
                return
            mine.set()

    thread = threading.Thread(target=body)
    thread.start()

    def turns() -> None:
        for _ in range(count // 2):
            theirs.set()
            mine.wait()
            mine.clear()

    times = _times_us(turns, REPETITIONS, count)
    stop = True
    theirs.set()
    thread.join()
    return times


def _set_stream_as_vllm_does(stream: torch.npu.Stream) -> None:
    """vLLM's own wrapper on CUDA: it remembers the stream, which its contexts compare with."""
    torch_utils._current_stream_tls.value = stream
    torch.npu.set_stream(stream)


class Layer:
    """About as many launches as a decoder layer of DeepSeek-V3 makes, and its two sums over ranks.

    The operators stand for those of that layer: norms, projections, rotation, attention's
    products, routing, grouped products. None of them does work here.
    """

    def __init__(self) -> None:
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16).npu()
        self.weight = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16).npu()
        self.gate = torch.zeros(HIDDEN, 64, dtype=torch.bfloat16).npu()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x, _, residual = torch_npu.npu_add_rms_norm(x, residual, self.norm)
        return _all_reduce(self.experts(_all_reduce(self.attention(x)), residual))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # down and up, each with a norm
            x, _ = torch_npu.npu_rms_norm(torch.mm(x, self.weight), self.norm)
        x = torch.cat([torch.neg(x), torch.mul(x, x)])[: x.shape[0]]  # rotation
        for _ in range(4):  # absorbed query, scores, values, output
            x = torch.mm(x, self.weight)
        return x

    def experts(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x, _, residual = torch_npu.npu_add_rms_norm(x, residual, self.norm)
        scores = torch.sigmoid(torch.mm(x, self.gate))
        weights, _ = torch.topk(scores, 8)
        weights = torch.div(weights, weights.sum(-1, keepdim=True))
        outputs = []
        for _ in range(2):  # routed and shared
            hidden = torch.nn.functional.silu(torch.mm(x, self.weight))
            outputs.append(torch.mm(hidden, self.weight))
        return torch.add(*outputs)


# Two sums (a copy and a collective each), 12 of attention and its norm, 13 of experts.
LAUNCHES_PER_LAYER = 29


def _all_reduce(partial: torch.Tensor) -> torch.Tensor:
    total = partial.clone()
    collective(lambda: dist.all_reduce(total, async_op=True))
    return total


def steps(count: int, num_layers: int) -> dict[str, list[float]]:
    """Host time of one step: whole, as two halves, as two halves in turn."""
    layers = [Layer() for _ in range(num_layers)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for layer in layers:
            x = layer(x, residual)
        return x

    batch = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16).npu()
    halves = batch.chunk(2)
    run = Interleave(StreamPool())
    found: dict[str, list[float]] = {"whole": [], "halves": [], "interleaved": []}
    # In turn, so that a change of the machine's speed meets all three.
    for _ in range(count):
        found["whole"] += _times_us(lambda: forward(batch), 1, 1)
        found["halves"] += _times_us(lambda: [forward(half) for half in halves], 1, 1)
        found["interleaved"] += _times_us(
            lambda: run.run([lambda half=half: forward(half) for half in halves]), 1, 1
        )
    return found


def main(count: int, num_steps: int, num_layers: int) -> None:
    torch_cuda_names.install()
    torch.cuda.set_stream = _set_stream_as_vllm_does
    torch.npu.set_device(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group(
        "hccl", f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=60), rank=0, world_size=1
    )
    found = {
        "hand_over": hand_overs(count),
        "vllm_hand_over": vllm_hand_overs(count),
        "collective": collectives_with_hand_overs(count),
        "bare_collective": bare_collectives(count),
        "switch": bare_switches(count),
        "event": bare_events(count),
        **steps(num_steps, num_layers),
        "launches_per_layer": LAUNCHES_PER_LAYER,
        "depth": DEPTH,
    }
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
