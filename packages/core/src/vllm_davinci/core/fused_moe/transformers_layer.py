"""Expert weights of models that vLLM runs by Transformers' own code (Hunyuan and others)."""

from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

from vllm_davinci.core.fused_moe.layer import NPURoutedExperts


class NPUTransformersRoutedExperts(NPURoutedExperts, TransformersRoutedExperts):
    """NPURoutedExperts, with the names that Transformers' models give to experts' weights."""
