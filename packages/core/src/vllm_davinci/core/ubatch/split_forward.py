"""Runs the forward of a step as ubatches: splits the inputs and merges the outputs."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.workspace import use_workspace_lane

from vllm_davinci.core.components.protocols import Split, StreamScheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.sized_choices import NORM_VECTOR_CORES, SizedChoices
from vllm_davinci.core.config.step_costs import costs_file
from vllm_davinci.core.device.core_limits import check_vector_cores, limit_memory_bound
from vllm_davinci.core.device.timeline import launch_label
from vllm_davinci.core.ubatch.forward_context import SwitchingContext, part_contexts
from vllm_davinci.core.ubatch.moe_entry import SlotPerUBatch, let_experts_switch
from vllm_davinci.core.ubatch.planned_step import SplitStep

Forward = Callable[..., Any]


class SplitForward:
    """Runs the forward of split steps, one at a time.

    Norms may use `dbo.norm_vector_cores` vector cores, or, if unset, the number that this engine's
    step times choose for each size. Raises ConfigurationError if the device has fewer.
    """

    def __init__(self, scheduler: StreamScheduler, vllm_config: VllmConfig) -> None:
        self._scheduler = scheduler
        self._vllm_config = vllm_config
        config = get_config(vllm_config)
        cores = config.dbo.norm_vector_cores
        self.limit_norms(cores)
        if cores is None:
            file = costs_file(config)
            self.limit_norms_by(SizedChoices.read(file, "steps", NORM_VECTOR_CORES))
        self._slots: list[SlotPerUBatch] = []
        self._label = launch_label()
        self._interleave = scheduler.interleave()

    def prepare(self, model: torch.nn.Module) -> None:
        """Makes every collective of a loaded model a switching point. Call it once."""
        self._slots = let_experts_switch(model, self._scheduler)

    def limit_norms(self, vector_cores: int | None) -> None:
        """Sets the vector cores of norms from now on; None: all."""
        check_vector_cores("dbo.norm_vector_cores", vector_cores)
        self._norm_vector_cores = vector_cores
        self._norm_cores_by_size: SizedChoices | None = None

    def limit_norms_by(self, by_size: SizedChoices | None) -> None:
        """Sets the vector cores of norms by step size from now on; None: as before."""
        for cores in () if by_size is None else by_size.choices:
            check_vector_cores(f"step_costs: {NORM_VECTOR_CORES}", cores)
        self._norm_cores_by_size = by_size

    def norm_vector_cores(self, num_tokens: int) -> int | None:
        """Vector cores of norms in a split step of `num_tokens` tokens; None: all."""
        if self._norm_cores_by_size is None:
            return self._norm_vector_cores
        return self._norm_cores_by_size.at(num_tokens)

    @property
    def num_switches(self) -> int:
        """Switches of the newest step from one ubatch to another inside a collective."""
        return self._interleave.num_switches

    def run(
        self,
        step: SplitStep,
        forward: Forward,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
        **model_kwargs: Any,
    ) -> Any:
        """The model's output for the whole step.

        forward: the model's, with the arguments below
        input_ids:            [num_tokens], or None when inputs_embeds are given
        positions:            [num_tokens] or [3, num_tokens]
        intermediate_tensors: output of the previous pipeline stage, rows as in input_ids
        inputs_embeds:        [num_tokens, hidden_size], or None
        model_kwargs:         passed to every ubatch unchanged
        Must be called in vLLM's forward context of the step. Raises the first error of any part.
        """
        split = step.split
        contexts = part_contexts(
            get_forward_context(), split, self._vllm_config, step.num_tokens_across_dp
        )
        running = SwitchingContext.showing(contexts[0])
        show = self._labelled(running.shower(contexts))

        ids, embeds = split.slice(input_ids), split.slice(inputs_embeds)
        position_parts = split.slice(positions, dim=-1)
        received = _slice_intermediate_tensors(split, intermediate_tensors)
        forwards = [
            _forward_of_part(
                index,
                forward,
                input_ids=ids[index],
                positions=position_parts[index],
                intermediate_tensors=received[index],
                inputs_embeds=embeds[index],
                **model_kwargs,
            )
            for index in range(len(contexts))
        ]
        try:
            with (
                override_forward_context(running),
                limit_memory_bound(self.norm_vector_cores(split.ubatches[-1].tokens.stop)),
            ):
                outputs = self._interleave.run(forwards, show)
        except BaseException:
            for slot in self._slots:
                slot.clear()
            raise
        finally:
            if self._label is not None:
                self._label("")
        return _merge(split, outputs)

    def _labelled(self, show: Callable[[int], None]) -> Callable[[int], None]:
        """`show`, which also labels the timeline with the index of the running ubatch."""
        label = self._label
        if label is None:
            return show

        def show_labelled(index: int) -> None:
            show(index)
            label(f"ubatch {index}")

        return show_labelled


def _forward_of_part(index: int, forward: Forward, **inputs: Any) -> Callable[[], Any]:
    """The forward of one ubatch, with a workspace of its own."""

    def call() -> Any:
        with use_workspace_lane(index):
            return forward(**inputs)

    return call


def _slice_intermediate_tensors(
    split: Split, whole: IntermediateTensors | None
) -> list[IntermediateTensors | None]:
    if whole is None:
        return [None] * len(split.ubatches)
    parts = {name: split.slice(tensor) for name, tensor in whole.items()}
    return [
        IntermediateTensors({name: rows[index] for name, rows in parts.items()})
        for index in range(len(split.ubatches))
    ]


def _merge(split: Split, outputs: list[Any]) -> Any:
    """Concatenates the ubatches' rows in order, in the structure that the model returned."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return split.merge(outputs)
    if isinstance(first, IntermediateTensors):
        names = first.tensors
        return IntermediateTensors(
            {name: split.merge([part.tensors[name] for part in outputs]) for name in names}
        )
    assert isinstance(first, tuple | list), f"cannot merge outputs of type {type(first).__name__}"
    return type(first)(_merge(split, list(parts)) for parts in zip(*outputs, strict=True))
