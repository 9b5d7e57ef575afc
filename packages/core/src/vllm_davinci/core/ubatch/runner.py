"""vLLM's runner, which runs steps as ubatches: dual-batch overlap."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_davinci.core import components
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.deciding_runner import DecidingRunner
from vllm_davinci.core.ubatch.step import StepRunner

T = TypeVar("T")
P = TypeVar("P")
Execution = tuple[CUDAGraphMode, BatchDescriptor, bool, torch.Tensor | None, Any]

logger = init_logger(__name__)


class UBatchRunner(DecidingRunner):
    """Runs a step as it was split: slot mappings, attention metadata and the forward per ubatch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if self._dbo.enabled:
            scheduler = components.stream_scheduler()
            assert scheduler is not None, "the platform checks this when the engine is configured"
            self._step_runner = StepRunner(scheduler, vllm_config, self._dbo.norm_vector_cores)

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """A builder keeps state of the batch it built for, so each ubatch has its own."""
        if not self._dbo.enabled:
            return super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        with self._parallel_setting("ubatch_size", self._dbo.num_ubatches):
            super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)

    def _get_slot_mappings(self, num_tokens_padded: int, *args: Any, **kwargs: Any) -> Any:
        by_group, by_layer = super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        if self._split_step is None or by_layer is None:
            return by_group, by_layer
        slices = [each.token_slice for each in self._split_step.padded_slices(num_tokens_padded)]
        # Layers of a group share a tensor: it is cut once.
        return by_group, _cut_once(by_layer, slices, lambda slots, part: slots[part])

    def _build_attention_metadata(
        self, num_tokens: int, num_reqs: int, max_query_len: int, *args: Any, **kwargs: Any
    ) -> Any:
        split_step, decodes = self._split_step, max_query_len <= self.uniform_decode_query_len
        if split_step is not None and not decodes:
            kwargs["ubatch_slices"] = split_step.slices()
        built = super()._build_attention_metadata(
            num_tokens, num_reqs, max_query_len, *args, **kwargs
        )
        if split_step is not None and decodes:
            # Requests are whole, and padding of a graph is requests as well, which vLLM cannot cut.
            parts = split_step.split.ubatches
            cut = _cut_once(
                built[0], parts, lambda whole, p: whole.of_decodes(p.requests, p.tokens)
            )
            built = cut, *built[1:]
        if self._layers_need_dp_prefills and self._any_dp_rank_prefills:
            by_layer = built[0] if isinstance(built[0], list) else [built[0]]
            for metadata in (each for part in by_layer for each in part.values()):
                if isinstance(metadata, NPUMLAMetadata):
                    metadata.others_prefill = True
        return built

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        inputs = {
            "input_ids": input_ids,
            "positions": positions,
            "intermediate_tensors": intermediate_tensors,
            "inputs_embeds": inputs_embeds,
            **model_kwargs,
        }
        if isinstance(self.model, CUDAGraphWrapper):
            return self.model(**inputs)  # which runs or captures `forward_as_ubatches`
        return self.forward_as_ubatches(super()._model_forward, **inputs)

    def forward_as_ubatches(self, forward: Callable[..., Any], **inputs: Any) -> Any:
        """The model's output for the step, split as it was decided. forward: the model's."""
        if self._split_step is None:
            return forward(**inputs)
        return self._step_runner.run(self._split_step, forward, **inputs)

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        model = self.get_model()
        # Models may keep rows of a step's images or videos, and take them by the step's numbers.
        self._splits_multimodal_steps = getattr(model, "splits_multimodal_steps", False)
        if self._dbo.enabled:
            self._step_runner.prepare(model)


def _cut_once(
    by_layer: dict[str, T], parts: Sequence[P], cut: Callable[[T, P], T]
) -> list[dict[str, T]]:
    """Per part, what each layer has of it; layers that share a whole share its parts."""
    wholes = {id(whole): whole for whole in by_layer.values()}
    cuts = [{key: cut(whole, part) for key, whole in wholes.items()} for part in parts]
    return [{name: of[id(whole)] for name, whole in by_layer.items()} for of in cuts]
