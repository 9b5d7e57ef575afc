"""Positions with several dimensions, of prompts and later tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu.mm.rope import RopeState

from vllm_davinci.core.runner.model_state import NPURopeState

SLOTS, ROWS, DIMENSIONS = 5, 40, 3
DEVICE = torch.device("npu")


def test_positions_equal_the_prompts_and_then_increase_by_one(step_of: Callable[..., Any]):
    state = NPURopeState.taking_over(RopeState(DIMENSIONS, SLOTS, ROWS, 64, DEVICE))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 99, (SLOTS, DIMENSIONS, 20), generator=generator)
    deltas = [-7, 0, 4, -2, 9]
    for slot, delta in enumerate(deltas):
        model: Any = SimpleNamespace(
            get_mrope_input_positions=lambda ids, features, s=slot, d=delta: (prompts[s], d)
        )
        state.init_prefill_positions(slot, model, list(range(20)), [])
    # A decode, a prompt's last part, a first part, and a prompt that starts again.
    slots, computed, lengths = [3, 0, 4, 1], [25, 12, 0, 5], [1, 8, 6, 3]
    state.step = step_of(slots, computed, lengths, [20] * 4)
    state.prepare_positions(*[torch.zeros(0)] * 4)  # as on the device
    written = state.get_positions(sum(lengths)).cpu()
    expected = []
    for slot, first, length in zip(slots, computed, lengths, strict=True):
        for position in range(first, first + length):
            of_prompt = prompts[slot][:, position].tolist() if position < 20 else None
            expected.append(of_prompt or [position + deltas[slot]] * DIMENSIONS)
    assert written.T.tolist() == expected
    again = state.read_prefill_positions(0, 5).cpu()
    assert again.tolist() == prompts[0][:, :5].tolist()
