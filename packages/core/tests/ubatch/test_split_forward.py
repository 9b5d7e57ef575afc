"""A step in ubatches: contexts, inputs and outputs, without an engine."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import (
    DPMetadata,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.sequence import IntermediateTensors

from vllm_davinci.core import components
from vllm_davinci.core.components.protocols import Split, StreamScheduler
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.ubatch.forward_context import SwitchingContext, part_contexts
from vllm_davinci.core.ubatch.moe_entry import SlotPerUBatch
from vllm_davinci.core.ubatch.planned_step import PlannedStep, SplitStep
from vllm_davinci.core.ubatch.split_forward import SplitForward


@pytest.fixture
def scheduler() -> StreamScheduler:
    found = components.stream_scheduler()
    assert found is not None
    return found


@pytest.fixture
def split(scheduler: StreamScheduler) -> Split:
    """Splits 12 tokens of three requests into three parts: 0-3, 4-7, 8-11."""
    policy = scheduler.split_policy(
        mode="token", num_ubatches=3, min_total_tokens=1, min_prefill_tokens=1
    )
    decided = policy.decide(scheduler.step_facts([6, 3, 3])).split
    assert decided is not None
    return decided


def whole_context(parts: int, **values: Any) -> ForwardContext:
    return ForwardContext(
        no_compile_layers={},
        attn_metadata=[{"layer": f"metadata {index}"} for index in range(parts)],
        slot_mapping=[{"layer": f"slots {index}"} for index in range(parts)],
        **values,
    )


def test_a_switching_context_reads_and_writes_the_part_that_runs():
    first, second = (whole_context(1, moe_layer_index=index) for index in (1, 2))
    context = SwitchingContext.showing(first)
    assert isinstance(context, ForwardContext)
    context.moe_layer_index += 10
    show = context.shower([first, second])
    show(1)
    assert context.moe_layer_index == 2
    context.moe_layer_index += 20
    assert (first.moe_layer_index, second.moe_layer_index) == (11, 22)
    for field in fields(ForwardContext):
        assert getattr(context, field.name) is getattr(second, field.name)
    show(0)
    assert context.moe_layer_index == 11


def test_layers_that_share_a_tensor_share_its_parts_and_stay_in_order(split: Split):
    shared, own = torch.arange(12), torch.arange(12) + 100
    layers = {"0": shared, "1": own, "2": shared}
    parts = PlannedStep(SplitStep(split)).slots(layers, 12)
    assert [list(part) for part in parts] == [["0", "1", "2"]] * 3
    for part, begin in zip(parts, (0, 4, 8), strict=True):
        assert part["0"] is part["2"]
        assert part["0"].tolist() == list(range(begin, begin + 4))
        assert part["1"].tolist() == list(range(begin + 100, begin + 104))


def test_leftovers_of_an_interrupted_step_are_dropped(split, scheduler, vllm_config):
    slot, model = SlotPerUBatch(scheduler), Model(scheduler)
    model.slot, model.fails_at = slot, 1
    with pytest.raises(ValueError, match="metadata 1"):
        run(model, split, vllm_config, [slot])
    assert slot._values == {}
    model.fails_at = None
    run(model, split, vllm_config, [slot])
    assert slot._values == {part: f"metadata {part}" for part in range(3)}


def test_each_part_gets_its_own_context(split: Split, vllm_config: VllmConfig):
    whole = whole_context(3, is_padding=torch.arange(14) > 11, moe_layer_index=5)
    whole.dp_metadata = DPMetadata(torch.tensor([12, 9]))
    counts = [torch.tensor([4, 3])] * 3
    contexts = part_contexts(whole, split, vllm_config, counts)
    assert [context.attn_metadata for context in contexts] == whole.attn_metadata
    assert [context.slot_mapping for context in contexts] == whole.slot_mapping
    assert [context.moe_layer_index for context in contexts] == [0, 0, 0]
    assert [context.is_padding.tolist() for context in contexts] == [
        [False] * 4,
        [False] * 4,
        [False] * 4 + [True] * 2,
    ]
    for context in contexts:
        assert context.dp_metadata.num_tokens_across_dp_cpu.tolist() == [4, 3]
    assert whole.moe_layer_index == 5


def test_slices_cover_the_step_and_padding_belongs_to_the_last(split: Split):
    step = SplitStep(split)
    tokens = [(s.token_slice.start, s.token_slice.stop) for s in step.slices()]
    requests = [(s.request_slice.start, s.request_slice.stop) for s in step.slices()]
    assert tokens == [(0, 4), (4, 8), (8, 12)]
    assert requests == [(0, 1), (0, 2), (1, 3)]
    assert [s.token_slice.stop for s in step.padded_slices(16)] == [4, 8, 16]
    assert step.padded_slices(12) == step.slices()
    assert step.padded_slices(0) == step.slices()


class Model:
    """A model that switches ubatches at `communicate` and records its inputs."""

    def __init__(self, scheduler: StreamScheduler) -> None:
        self.scheduler = scheduler
        self.seen: list[tuple[str, int]] = []
        self.fails_at: int | None = None
        self.slot: Any = {}

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
        scale: float,
    ) -> Any:
        rows = input_ids if input_ids is not None else inputs_embeds
        assert rows is not None
        if intermediate_tensors is not None:
            rows = rows + intermediate_tensors["hidden_states"]
        total = rows + positions[-1] * scale
        for layer in range(2):
            name = get_forward_context().attn_metadata["layer"]
            self.seen.append((name, layer))
            self.slot[0] = name
            if layer == 1 and name == f"metadata {self.fails_at}":
                raise ValueError(name)
            self.scheduler.communicate(lambda: total.add_(1))
        return total, IntermediateTensors({"hidden_states": total * 2})


def run(model: Model, split: Split, vllm_config: VllmConfig, slots: Sequence[Any] = ()) -> Any:
    ids = torch.arange(14.0)
    positions = torch.arange(3 * 14.0).view(3, 14)
    received = IntermediateTensors({"hidden_states": torch.arange(14.0) * 100})
    runner = SplitForward(model.scheduler, vllm_config)
    runner._slots = list(slots)
    with override_forward_context(whole_context(3)):
        whole = get_forward_context()
        try:
            return runner.run(SplitStep(split), model, ids, positions, received, None, scale=10.0)
        finally:
            assert get_forward_context() is whole


def test_a_split_step_gives_the_rows_of_a_whole_one(split, scheduler, vllm_config):
    model = Model(scheduler)
    total, sent = run(model, split, vllm_config)
    rows = torch.arange(14.0)
    expected = rows + rows * 100 + (rows + 28) * 10 + 2
    assert torch.equal(total, expected)
    assert torch.equal(sent["hidden_states"], expected * 2)
    assert model.seen == [(f"metadata {part}", layer) for layer in (0, 1) for part in range(3)]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_an_error_in_any_part_is_the_step_s_error_and_the_next_step_runs(
    part: int, split: Split, scheduler: StreamScheduler, vllm_config: VllmConfig
):
    model = Model(scheduler)
    model.fails_at = part
    with pytest.raises(ValueError, match=f"metadata {part}"):
        run(model, split, vllm_config)
    model.fails_at = None
    total, _ = run(model, split, vllm_config)
    assert total.shape == (14,)


def test_norms_take_the_cores_that_are_chosen_for_the_step_s_size(scheduler, vllm_config, tmp_path):
    file = tmp_path / "costs.json"
    rows = [{"tokens": 128, "norm_vector_cores": 8}, {"tokens": 4096, "norm_vector_cores": None}]
    file.write_text(json.dumps({"steps": rows}))
    vllm_config.additional_config = {"step_costs": str(file)}
    forward = SplitForward(scheduler, vllm_config)
    assert [forward.norm_vector_cores(tokens) for tokens in (64, 200, 4096)] == [8, 8, None]
    forward.limit_norms(4)
    assert forward.norm_vector_cores(200) == 4
    vllm_config.additional_config = {"step_costs": str(file), "dbo": {"norm_vector_cores": 2}}
    assert SplitForward(scheduler, vllm_config).norm_vector_cores(200) == 2


def test_more_cores_than_there_are_are_refused(scheduler, vllm_config, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"steps": [{"tokens": 128, "norm_vector_cores": 9999}]}))
    vllm_config.additional_config = {"step_costs": str(file)}
    with pytest.raises(ConfigurationError, match="step_costs: norm_vector_cores = 9999"):
        SplitForward(scheduler, vllm_config)
