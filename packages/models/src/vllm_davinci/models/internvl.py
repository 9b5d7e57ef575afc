"""InternVL and Intern-S1 in transformers' format; steps with new images do not wait."""

from typing import ClassVar

from vllm.model_executor.models import interns1


class NPUInternS1ForConditionalGeneration(interns1.InternS1ForConditionalGeneration):
    """vLLM's model, which passes on the mask of image tokens and only indexes with it."""

    indexes_multimodal_tokens: ClassVar[bool] = True
