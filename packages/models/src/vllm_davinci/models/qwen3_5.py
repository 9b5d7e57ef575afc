"""Qwen3.5 with images and videos, before layers of which most keep states."""

from typing import ClassVar

from vllm.model_executor.models import qwen3_5, qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_davinci.models.qwen3_vl import NPUQwen3VLProcessingInfo


class NPUQwen35ProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5ProcessingInfo):
    """vLLM's, with Qwen3-VL's processor."""


class NPUQwen35MoeProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5MoeProcessingInfo):
    """The same, of the model with experts."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=NPUQwen35ProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class NPUQwen35ForConditionalGeneration(qwen3_5.Qwen3_5ForConditionalGeneration):
    """vLLM's, which puts rows of images into those of text and no further."""

    indexes_multimodal_tokens: ClassVar[bool] = True


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=NPUQwen35MoeProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class NPUQwen35MoeForConditionalGeneration(qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """The same with experts."""

    indexes_multimodal_tokens: ClassVar[bool] = True
