"""The schemes of compressed-tensors that layers here support."""

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType

NAME = "compressed-tensors"
WAY_OUT = "Run vllm-davinci quantize on the float checkpoint and serve what it writes"


def refusal(weights: Any, activations: Any, is_expert: bool = False) -> str | None:
    """The reason why layers of a scheme are not supported, or None if they are.

    weights, activations: QuantizationArgs of the format, or None
    """
    if not isinstance(weights, QuantizationArgs):
        return "float weights and quantized activations are not available"
    if weights.num_bits != 8 or weights.type != QuantizationType.INT:
        return (
            f"weights of {weights.num_bits} bits ({weights.type}) are not available; those of 8 "
            "bits (int) are"
        )
    channel, tensor = QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR
    if not weights.symmetric or weights.strategy not in (
        (channel,) if is_expert else (channel, tensor)
    ):
        symmetry = "symmetric" if weights.symmetric else "asymmetric"
        return (
            f"{symmetry} int8 weights with a scale per {weights.strategy} are not available; "
            f"symmetric ones with a scale per channel{'' if is_expert else ' or tensor'} are"
        )
    if not isinstance(activations, QuantizationArgs):
        return "int8 weights and float activations are not available; int8 activations are"
    is_int8 = activations.num_bits == 8 and activations.type == QuantizationType.INT
    expected = QuantizationStrategy.TOKEN if activations.dynamic else tensor
    if not is_int8 or activations.strategy != expected:
        return (
            f"activations of {activations.num_bits} bits ({activations.type}) with a "
            f"{'dynamic' if activations.dynamic else 'static'} scale per {activations.strategy} "
            "are not available; int8 with a dynamic one per token or a static one per tensor are"
        )
    if is_expert and not (activations.dynamic and activations.symmetric):
        return (
            "static or asymmetric activations are not available; dynamic symmetric ones of tokens "
            "are"
        )
    return None
