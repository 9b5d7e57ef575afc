"""Measures for switch.py in one process."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from vllm.forward_context import ForwardContext, override_forward_context

from multistream import vllm_threads
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.ubatch.forward_context import SwitchingContext
from vllm_davinci.multistream import Interleave, StreamPool, communicate

T = TypeVar("T")

REPETITIONS = 15
# Interleaved and bare all-reduces alternate in short rounds, so that both run at the same machine
# speed.
ROUNDS, ROUNDS_PER_COUNT = 61, 10
DEPTH = 20  # frames between a model's root and its collectives, as in vLLM's models
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
        return run.run(forwards, running.shower(contexts))


def vllm_hand_overs(count: int, at_a_collective: Callable[[], None]) -> list[float]:
    """Times hand-overs between two ubatches with vLLM's contexts, each in a thread."""

    def turns() -> None:
        for _ in range(count // 2):
            at_a_collective()

    def body() -> None:
        _at_depth(DEPTH, turns)

    return _times_us(lambda: vllm_threads.run_two(body, _contexts()), REPETITIONS, count)


def beyond_collectives(count: int) -> list[float]:
    """Times two ubatches' all-reduces, with nothing else in them, beyond the time of serial
    ones.
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

    beyond = []
    for number in range(ROUNDS):
        first, second = (bare, in_turn) if number % 2 else (in_turn, bare)
        times = {first: first(), second: second()}
        beyond.append(times[in_turn] - times[bare])
    return beyond


# Launches of a decoder layer of DeepSeek-V3: attention with its norm, then the experts. Two
# all-reduces (a copy and a collective each) add four.
LAUNCHES = (12, 13)
LAUNCHES_PER_LAYER = sum(LAUNCHES) + 4


def layer(x: torch.Tensor) -> torch.Tensor:
    """Makes about as many launches as a decoder layer, without arithmetic."""
    for count in LAUNCHES:
        for _ in range(count):
            x = torch.neg(x)
        x = _all_reduce(x)
    return x


def _all_reduce(partial: torch.Tensor) -> torch.Tensor:
    total = partial.clone()
    communicate(lambda: dist.all_reduce(total, async_op=True), on="library")
    return total


def steps(count: int, num_layers: int) -> dict[str, list[float]]:
    """Measures the host time of a step as two halves one after the other, and as two interleaved
    halves.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_layers):
            x = layer(x)
        return x

    halves = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16).npu().chunk(2)
    run = Interleave(StreamPool())
    found: dict[str, list[float]] = {"halves": [], "interleaved": []}
    # The orders alternate, so that changes of the machine's speed affect both.
    for _ in range(count):
        found["halves"] += _times_us(lambda: [forward(half) for half in halves], 1, 1)
        found["interleaved"] += _times_us(
            lambda: _in_turn(run, [lambda half=half: forward(half) for half in halves]), 1, 1
        )
    return found


def measure(options: dict[str, int]) -> dict[str, Any]:
    count = options["hand_overs"]
    torch_cuda_names.install()
    torch.cuda.set_stream = vllm_threads.set_stream
    torch.npu.set_device(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    dist.init_process_group(
        "hccl", f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=60), rank=0, world_size=1
    )
    found = {
        "vllm_dispatch": vllm_hand_overs(count, vllm_threads.at_a_dispatch),
        "vllm_combine": vllm_hand_overs(count, vllm_threads.at_a_combine),
        "beyond_collective": beyond_collectives(count),
        **steps(options["steps"], options["layers"]),
        "launches_per_layer": LAUNCHES_PER_LAYER,
        "depth": DEPTH,
    }
    dist.destroy_process_group()
    return found
