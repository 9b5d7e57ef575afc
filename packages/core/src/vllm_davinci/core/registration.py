"""What vLLM's general plugin calls: tells vLLM about our layers and model definitions."""

from vllm_davinci.core.server_exit import fail_when_engine_dies


def register() -> None:
    """Registers out-of-tree layers, quantization and models. Idempotent, and touches no device.

    vLLM calls this in every process, before any model is built.
    """
    from vllm_davinci.core.ops.registration import register_layers  # imports vLLM's layers
    from vllm_davinci.core.quantization.registration import register as register_quantization

    register_layers()
    register_quantization()
    _register_models()
    fail_when_engine_dies()


def _register_models() -> None:
    """Makes vLLM take the definitions of installed model providers instead of its own."""
    from vllm.model_executor.models import ModelRegistry  # imported late, as above

    from vllm_davinci.core import components

    for provider in components.find(components.MODELS).values():
        for architecture, path in provider.models().items():
            ModelRegistry.register_model(architecture, path)
