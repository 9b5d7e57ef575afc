"""Idefics3, SmolVLM and Aria, whose images share an encoder."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.aria import AriaForConditionalGeneration
from vllm.model_executor.models.idefics3 import (
    Idefics3ForConditionalGeneration,
    Idefics3ImagePixelInputs,
)
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration


class NPUIdefics3ForConditionalGeneration(Idefics3ForConditionalGeneration):
    """vLLM's model, which looks for no squares of padding: inputs of vLLM's processor have none."""

    def _process_image_pixels(self, inputs: Idefics3ImagePixelInputs) -> torch.Tensor:
        features: torch.Tensor = self.model.image_pixels_to_features(
            inputs["pixel_values"],
            pixel_attention_mask=inputs["pixel_attention_mask"],
            remove_padding=False,
        )
        return features


class NPUSmolVLMForConditionalGeneration(SmolVLMForConditionalGeneration):
    """The same for SmolVLM."""

    _process_image_pixels = NPUIdefics3ForConditionalGeneration._process_image_pixels


class NPUAriaForConditionalGeneration(AriaForConditionalGeneration):
    """vLLM's model. Attention of the encoder masks the padding of images, as in transformers."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        self.vision_tower.apply_encoder_attention_mask = True
