"""Expert weights of models that vLLM runs with Transformers' own code (Hunyuan and others)."""

from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

from vllm_davinci.core.fused_moe.layer import NPURoutedExperts


class NPUTransformersRoutedExperts(NPURoutedExperts, TransformersRoutedExperts):
    """NPURoutedExperts with Transformers' names of expert weights."""
