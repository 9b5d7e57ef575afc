"""InternVL and Intern-S1 in transformers' format, whose steps with new images wait for nothing."""

from typing import ClassVar

from vllm.model_executor.models import interns1


class NPUInternS1ForConditionalGeneration(interns1.InternS1ForConditionalGeneration):
    """vLLM's, which passes on what says which tokens are images', and only indexes with it."""

    indexes_multimodal_tokens: ClassVar[bool] = True
