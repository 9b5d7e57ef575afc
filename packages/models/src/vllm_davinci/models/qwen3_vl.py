"""Qwen3-VL: splittable steps, and videos with newer releases of transformers."""

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.model_executor.models import qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.inputs.ubatch_tokens import first_token_of_ubatch


class NPUQwen3VLProcessor(qwen3_vl.Qwen3VLProcessor):
    """transformers' processor, which accepts video placeholders in a text without videos.

    vLLM processes videos one by one, then text and images, and fills the video placeholders itself.
    Newer releases of transformers refuse such a text.
    """

    def validate_inputs(
        self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any
    ) -> None:
        if videos is None and text is not None:
            texts = [text] if isinstance(text, str) else text
            text = [each.replace(self.video_token, "") for each in texts]
        super().validate_inputs(images=images, text=text, videos=videos, **kwargs)


class NPUQwen3VLProcessingInfo(qwen3_vl.Qwen3VLProcessingInfo):
    """vLLM's class, with the processor above."""

    def get_hf_processor(self, **kwargs: object) -> NPUQwen3VLProcessor:
        processor: NPUQwen3VLProcessor = self.ctx.get_hf_processor(NPUQwen3VLProcessor, **kwargs)
        return processor


# Decorators of models with Qwen3-VL's inputs; info: their processing information
with_processor = partial(
    MULTIMODAL_REGISTRY.register_processor,
    qwen3_vl.Qwen3VLMultiModalProcessor,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)


@with_processor(info=NPUQwen3VLProcessingInfo)
class NPUQwen3VLForConditionalGeneration(qwen3_vl.Qwen3VLForConditionalGeneration):
    """vLLM's model; its first layers get rows of the images (DeepStack), separately per ubatch."""

    splits_multimodal_steps: ClassVar[bool] = True
    indexes_multimodal_tokens: ClassVar[bool] = True

    def embed_input_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Drops the previous forward's rows: each ubatch only zeroes its own, as it does not know
        # whether it is the last.
        self.deepstack_input_embeds_num_tokens = 0
        return super().embed_input_ids(*args, **kwargs)

    def _get_deepstack_input_embeds(self, num_tokens: int) -> IntermediateTensors | None:
        first = first_token_of_ubatch()
        if first is None:
            return super()._get_deepstack_input_embeds(num_tokens)
        whole = super()._get_deepstack_input_embeds(first + num_tokens)
        if whole is None:
            return None
        return IntermediateTensors({name: rows[first:] for name, rows in whole.items()})

    def _clear_deepstack_input_embeds(self, num_tokens: int) -> None:
        first = first_token_of_ubatch()
        if first is None:
            super()._clear_deepstack_input_embeds(num_tokens)
        elif first < self.deepstack_input_embeds_num_tokens:
            for rows in self.deepstack_input_embeds:
                rows[first : first + num_tokens].zero_()
