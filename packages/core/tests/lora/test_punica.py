"""A step's LoRA deltas: each row's own, and exact zeros without an adapter."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.lora.layers import LoRAMapping, VocabParallelEmbeddingWithLoRA

from vllm_davinci.core.inputs.ubatch_tokens import set_first_token
from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.stacked_weights import (
    StackedSlices,
    _columns_by_slot,
    _stack_a,
    _stack_b,
    columns,
    stack_weights,
)
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.layers.launch_counter import LaunchCounter

SLOTS, RANK, IN, OUTS = 3, 8, 32, (16, 24)
IDS = (7, 0, 9, 7, 0, 8)  # each row's adapter; 0: none
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


def test_embeddings_and_logits_get_the_deltas_of_their_rows(wrapper: NPUPunicaWrapper):
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(SLOTS, 1, RANK, IN, generator=generator)
    b = torch.randn(SLOTS, 1, OUTS[0], RANK, generator=generator)
    by_slot = columns(_columns_by_slot(zeros(*b.shape))).view(OUTS[0], SLOTS, RANK)
    by_slot.copy_(b.squeeze(1).permute(1, 0, 2))
    stacked = by_slot.permute(1, 0, 2).unsqueeze(1)
    x = torch.randn(len(IDS), IN, generator=generator)
    looked_up = torch.randn(len(IDS), SLOTS, RANK, generator=generator)
    embeddings, logits = zeros(len(IDS), OUTS[0]), zeros(len(IDS), OUTS[0] + 8)
    wrapper.add_lora_embedding(embeddings, looked_up.flatten(1).npu(), stacked)
    wrapper.add_lora_logits(logits, x.npu(), a.npu(), stacked, 1.0)
    assert not logits[:, OUTS[0] :].count_nonzero()  # the padded vocabulary
    for row, adapter in enumerate(IDS):
        slot = SLOT_OF.index(adapter) if adapter else None
        own = torch.zeros(OUTS[0], RANK) if slot is None else b[slot, 0]
        shrunk = torch.zeros(RANK) if slot is None else a[slot, 0] @ x[row]
        close = {"rtol": 1e-4, "atol": 1e-4 if adapter else 0.0}
        found = looked_up[row, slot or 0]
        torch.testing.assert_close(embeddings[row].cpu(), own @ found, **close)
        torch.testing.assert_close(logits[row, : OUTS[0]].cpu(), own @ shrunk, **close)


def test_ubatches_get_the_deltas_of_their_own_rows(wrapper: NPUPunicaWrapper, weights: Any):
    x = torch.randn(len(IDS), IN, generator=torch.Generator().manual_seed(1)).npu()
    whole, parts = zeros(len(IDS), sum(OUTS)), zeros(len(IDS), sum(OUTS))
    wrapper.add_lora_linear(whole, x, *weights, 1.0, OUTS)
    wrapper.keep_slots()
    wrapper.update_metadata(LoRAMapping(IDS, IDS, is_prefill=True), list(SLOT_OF), SLOTS, 100)
    slots = wrapper.slots(len(IDS))
    for rows in (slice(0, 2), slice(2, len(IDS))):
        context = create_forward_context(None, VllmConfig())
        set_first_token(context, rows.start)
        with override_forward_context(context):
            wrapper.add_lora_linear(parts[rows], x[rows], *weights, 1.0, OUTS)
            assert wrapper.slots(rows.stop - rows.start).equal(slots[rows])
    assert parts.equal(whole)


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


def test_a_token_finds_all_slots_in_one_row_of_a_table():
    layer = VocabParallelEmbeddingWithLoRA.__new__(VocabParallelEmbeddingWithLoRA)
    torch.nn.Module.__init__(layer)
    vocabulary = 10
    layer.lora_a_stacked = zeros(SLOTS, vocabulary, RANK)
    layer.lora_b_stacked = zeros(SLOTS, 1, OUTS[0], RANK)
    stack_weights(layer)
    for slot in range(SLOTS):
        layer.set_lora(slot, torch.full((RANK, vocabulary), slot + 1.0), torch.ones(OUTS[0], RANK))
    layer.reset_lora(1)
    expected = torch.tensor([1.0, 0.0, 3.0]).repeat_interleave(RANK)
    assert layer.lora_a_stacked_2d.cpu().equal(expected.expand(vocabulary, -1))
