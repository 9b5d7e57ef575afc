"""Adapters' deltas of one step: each row's own, and exact zeros without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping

from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.stacked_weights import StackedSlices, _stack_a, _stack_b
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.layers.launch_counter import LaunchCounter

SLOTS, RANK, IN, OUTS = 3, 8, 32, (16, 24)
IDS = (7, 0, 9, 7, 0, 8)  # adapter of each row; 0 stands for none
SLOT_OF = [8, 7, 9]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="npu")


@pytest.fixture
def wrapper() -> NPUPunicaWrapper:
    config = LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK)
    made = NPUPunicaWrapper(16, 8, torch.device("npu"), lora_config=config)
    made.update_metadata(LoRAMapping(IDS, IDS, is_prefill=True), list(SLOT_OF), SLOTS, 100)
    return made


@pytest.fixture
def weights() -> tuple[StackedSlices, StackedSlices]:
    generator = torch.Generator().manual_seed(0)
    a = _stack_a(tuple(zeros(SLOTS, 1, RANK, IN) for _ in OUTS))
    b = _stack_b(tuple(zeros(SLOTS, 1, out, RANK) for out in OUTS))
    for stacked in (*a, *b):
        stacked.copy_(torch.randn(stacked.shape, generator=generator))
    return a, b


def test_each_row_gets_the_delta_of_its_slot(wrapper: NPUPunicaWrapper, weights: Any):
    a, b = weights
    x = torch.randn(len(IDS), IN, generator=torch.Generator().manual_seed(1))
    y = zeros(len(IDS), sum(OUTS))
    wrapper.add_lora_linear(y, x.npu(), a, b, 1.0, OUTS)
    for row, adapter in enumerate(IDS):
        if adapter == 0:
            assert not y[row].count_nonzero()
            continue
        slot = SLOT_OF.index(adapter)
        pairs = [(a[i][slot, 0].cpu(), b[i][slot, 0].cpu()) for i in range(len(OUTS))]
        expected = torch.cat([x[row] @ one.T @ two.T for one, two in pairs])
        torch.testing.assert_close(y[row].cpu(), expected, rtol=1e-4, atol=1e-3)


def test_a_layer_takes_four_launches_and_no_wait(wrapper: NPUPunicaWrapper, weights: Any):
    x, y = zeros(len(IDS), IN), zeros(len(IDS), sum(OUTS))
    before = _C.host_counts()
    with LaunchCounter() as counter:
        wrapper.add_lora_linear(y, x, *weights, 1.0, OUTS)
    wrapper.update_metadata(LoRAMapping(IDS, IDS, is_prefill=True), list(SLOT_OF), SLOTS, 100)
    after = _C.host_counts()
    assert len(counter.names) == 4, counter.names
    assert [after[name] - before[name] for name in ("synchronizations", "copies_to_host")] == [0, 0]


def test_a_step_without_adapters_launches_nothing(wrapper: NPUPunicaWrapper, weights: Any):
    x, y = zeros(2, IN), zeros(2, sum(OUTS))
    wrapper.update_metadata(LoRAMapping((0, 0), (0, 0), is_prefill=True), list(SLOT_OF), SLOTS, 9)
    with LaunchCounter() as counter:
        wrapper.add_lora_linear(y, x, *weights, 1.0, OUTS)
    assert not counter.names


def test_rows_that_only_pad_a_step_look_up_inside_the_table(wrapper: NPUPunicaWrapper):
    assert int(wrapper._embeddings_indices.max()) <= 2 * 100
    assert int(wrapper._embeddings_indices.min()) == 0
