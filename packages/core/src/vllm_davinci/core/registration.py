"""What vLLM's general plugin calls: tells vLLM about our layers."""


def register() -> None:
    """Registers out-of-tree layers and quantization. Idempotent, and touches no device.

    vLLM calls this in every process, before any model is built.
    """
    from vllm_davinci.core.ops.registration import register_layers  # imports vLLM's layers
    from vllm_davinci.core.quantization.registration import register as register_quantization

    register_layers()
    register_quantization()
