"""Measures one process's part of switch.py: `switch_process.py HAND_OVERS STEPS LAYERS`."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import greenlet
import torch
import torch.distributed as dist
import torch_npu
import vllm_threads
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.ubatch.forward_context import SwitchingContext
from vllm_davinci.multistream import Interleave, StreamPool, communicate

T = TypeVar("T")

REPETITIONS = 15
# Pairs of a round of interleaved sums and a round of bare sums. Rounds are short, so that the
# machine has the same speed in both.
ROUNDS, ROUNDS_PER_COUNT = 61, 10
LIMIT_S = 60
DEPTH = 20  # Python frames between a model's root and its collectives, as in vLLM's models
HIDDEN = 512
TOKENS = 64


def _times_us(action: Callable[[], object], count: int, per: int) -> list[float]:
    """Runs an action `count` times after a warm-up; returns microseconds per run, divided by
    `per`.
    """
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


def _contexts() -> list[ForwardContext]:
    """Makes a forward context for each of a step's ubatches."""
    return [
        ForwardContext(no_compile_layers={}, attn_metadata={"half": index}, slot_mapping={})
        for index in range(2)
    ]


def _in_turn(run: Interleave, forwards: list[Callable[[], T]]) -> list[T]:
    """Runs forwards as core runs a step: vLLM sees the running ubatch's forward context."""
    contexts = _contexts()
    running = SwitchingContext.showing(contexts[0])
    with override_forward_context(running):
        return run.run(forwards, lambda index: running.show(contexts[index]))


def hand_overs(count: int) -> list[float]:
    """Times hand-overs between two ubatches that only take turns."""
    run = Interleave(StreamPool())
    nothing = lambda: None  # noqa: E731

    def turns() -> None:
        for _ in range(count // 2):
            communicate(nothing)

    def body() -> None:
        _at_depth(DEPTH, turns)

    return _times_us(lambda: _in_turn(run, [body, body]), REPETITIONS, count)


def vllm_hand_overs(count: int, at_a_collective: Callable[[], None]) -> list[float]:
    """Times the same hand-overs with vLLM's contexts, a thread per ubatch."""

    def turns() -> None:
        for _ in range(count // 2):
            at_a_collective()

    def body() -> None:
        _at_depth(DEPTH, turns)

    return _times_us(lambda: vllm_threads.run_two(body, _contexts()), REPETITIONS, count)


def beyond_collectives(count: int) -> tuple[list[float], list[float]]:
    """Time per sum over ranks of two ubatches that do nothing else, and its excess over serial
    sums.
    """
    run = Interleave(StreamPool())
    total = torch.zeros(1).npu()
    per_round = max(2, count // ROUNDS_PER_COUNT)

    def turns() -> None:
        for _ in range(per_round // 2):
            communicate(lambda: dist.all_reduce(total, async_op=True), on="library")

    def body() -> None:
        _at_depth(DEPTH, turns)

    def in_turn() -> float:
        return _times_us(lambda: _in_turn(run, [body, body]), 1, per_round)[0]

    def bare() -> float:
        def sums() -> None:
            for _ in range(per_round):
                dist.all_reduce(total)

        return _times_us(sums, 1, per_round)[0]

    taken, beyond = [], []
    for number in range(ROUNDS):
        first, second = (bare, in_turn) if number % 2 else (in_turn, bare)
        times = {first: first(), second: second()}
        taken.append(times[in_turn])
        beyond.append(times[in_turn] - times[bare])
    return taken, beyond


def bare_switches(count: int) -> list[float]:
    """Time per switch of greenlet.switch there and back."""
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
    """Time per switch of two threads that wake each other with threading.Event."""
    mine, theirs, stop = threading.Event(), threading.Event(), False

    def body() -> None:
        while True:
            theirs.wait()  # as vLLM does, without a limit, which costs; the process has one
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
    thread.join(LIMIT_S)
    return times


class Layer:
    """Makes about as many launches as a decoder layer of DeepSeek-V3, and its two sums over ranks.

    The operators stand for the layer's norms, projections, rotation, attention products, routing
    and grouped products. None does any arithmetic here.
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
    communicate(lambda: dist.all_reduce(total, async_op=True), on="library")
    return total


def steps(count: int, num_layers: int) -> dict[str, list[float]]:
    """Host time of one step: whole, as two halves one after the other, as two interleaved
    halves.
    """
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
    # In turn, so that changes of the machine's speed affect all three.
    for _ in range(count):
        found["whole"] += _times_us(lambda: forward(batch), 1, 1)
        found["halves"] += _times_us(lambda: [forward(half) for half in halves], 1, 1)
        found["interleaved"] += _times_us(
            lambda: _in_turn(run, [lambda half=half: forward(half) for half in halves]), 1, 1
        )
    return found


def main(count: int, num_steps: int, num_layers: int) -> None:
    torch_cuda_names.install()
    torch.cuda.set_stream = vllm_threads.set_stream
    torch.npu.set_device(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group(
        "hccl", f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=60), rank=0, world_size=1
    )
    taken, beyond = beyond_collectives(count)
    found = {
        "hand_over": hand_overs(count),
        "vllm_dispatch": vllm_hand_overs(count, vllm_threads.at_a_dispatch),
        "vllm_combine": vllm_hand_overs(count, vllm_threads.at_a_combine),
        "vllm_both": vllm_hand_overs(count, vllm_threads.at_both),
        "collective": taken,
        "beyond_collective": beyond,
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
