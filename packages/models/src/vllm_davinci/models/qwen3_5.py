"""Qwen3.5 with images and videos: Qwen3-VL's encoder before a hybrid model (recurrent state)."""

from typing import ClassVar

from vllm.model_executor.models import qwen3_5

from vllm_davinci.models.qwen3_vl import NPUQwen3VLProcessingInfo, with_processor


class NPUQwen3_5ProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5ProcessingInfo):  # noqa: N801
    """vLLM's class, with Qwen3-VL's processor that accepts video placeholders."""


class NPUQwen3_5MoeProcessingInfo(NPUQwen3VLProcessingInfo, qwen3_5.Qwen3_5MoeProcessingInfo):  # noqa: N801
    """vLLM's class, with Qwen3-VL's processor that accepts video placeholders."""


@with_processor(info=NPUQwen3_5ProcessingInfo)
class NPUQwen3_5ForConditionalGeneration(qwen3_5.Qwen3_5ForConditionalGeneration):  # noqa: N801
    """vLLM's model, which accepts indices of image tokens."""

    indexes_multimodal_tokens: ClassVar[bool] = True


@with_processor(info=NPUQwen3_5MoeProcessingInfo)
class NPUQwen3_5MoeForConditionalGeneration(qwen3_5.Qwen3_5MoeForConditionalGeneration):  # noqa: N801
    """vLLM's model, which accepts indices of image tokens."""

    indexes_multimodal_tokens: ClassVar[bool] = True
