"""Quantized checkpoints: the supported methods of `--quantization`."""

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.features.feature import Feature

FLAG = "--quantization"
METHODS = ("ascend", "compressed-tensors", "fp8", "auto_awq", "auto_gptq")  # core.quantization


def refuse_quantization(quant: str) -> None:
    """Raises UnsupportedFeatureError for an unsupported quantization method."""
    if quant not in METHODS:
        raise UnsupportedFeatureError(
            f"{FLAG} {quant!r} is not supported in {RELEASE}; {', '.join(METHODS)} are. Use the "
            f"model's unquantized checkpoint and leave {FLAG} out, or make an int8 checkpoint of "
            "it: vllm-davinci quantize SOURCE DESTINATION."
        )


FEATURES = (
    Feature(FLAG, "quantized checkpoints", lambda e: bool(getattr(e.model, "quantization", None))),
)
