"""Qwen3.5 with images and videos: Qwen3-VL's encoder before a hybrid model (recurrent state)."""

from typing import ClassVar

from vllm.model_executor.models import qwen3_5, qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_davinci.models.qwen3_vl import NPUQwen3VLProcessingInfo


class NPUQwen3_5ProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5ProcessingInfo):  # noqa: N801
    """vLLM's class, with Qwen3-VL's processor that accepts video placeholders."""


class NPUQwen3_5MoeProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5MoeProcessingInfo):  # noqa: N801
    """vLLM's class, with Qwen3-VL's processor that accepts video placeholders."""


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=NPUQwen3_5ProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class NPUQwen3_5ForConditionalGeneration(qwen3_5.Qwen3_5ForConditionalGeneration):  # noqa: N801
    """vLLM's model, which accepts indices of image tokens."""

    indexes_multimodal_tokens: ClassVar[bool] = True


@MULTIMODAL_REGISTRY.register_processor(
    qwen3_vl.Qwen3VLMultiModalProcessor,
    info=NPUQwen3_5MoeProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class NPUQwen3_5MoeForConditionalGeneration(qwen3_5.Qwen3_5MoeForConditionalGeneration):  # noqa: N801
    """vLLM's model, which accepts indices of image tokens."""

    indexes_multimodal_tokens: ClassVar[bool] = True
