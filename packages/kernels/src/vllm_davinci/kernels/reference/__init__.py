"""Definition of every operator in plain torch: same names, arguments and results.

They run on any device. Norms, softmax and products accumulate in fp32; results are rounded once to
the dtype of the output. The tests and the meta functions are held against these.
"""

from vllm_davinci.kernels.reference.attention import (
    mla_decode_attention,
    paged_attention,
    prefill_attention,
)
from vllm_davinci.kernels.reference.block_fp8 import block_fp8_floats, block_fp8_integers
from vllm_davinci.kernels.reference.experts import (
    experts,
    experts_w8a8,
    routed_experts,
    routed_experts_w8a8,
)
from vllm_davinci.kernels.reference.kv_cache import copy_kv_blocks
from vllm_davinci.kernels.reference.mla import mla_preprocess, mla_preprocess_w8a8
from vllm_davinci.kernels.reference.norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    add_rms_norm_quant,
    rms_norm,
)
from vllm_davinci.kernels.reference.quantization import (
    dynamic_quant,
    dynamic_quant_in_launch,
    static_quant,
    to_int8,
)
from vllm_davinci.kernels.reference.rotary import rotary_embedding
from vllm_davinci.kernels.reference.vocabulary import vocab_parallel_embedding

__all__ = [
    "add_rms_norm",
    "add_rms_norm_dynamic_quant",
    "add_rms_norm_quant",
    "block_fp8_floats",
    "block_fp8_integers",
    "copy_kv_blocks",
    "dynamic_quant",
    "dynamic_quant_in_launch",
    "experts",
    "experts_w8a8",
    "mla_decode_attention",
    "mla_preprocess",
    "mla_preprocess_w8a8",
    "paged_attention",
    "prefill_attention",
    "rms_norm",
    "rotary_embedding",
    "routed_experts",
    "routed_experts_w8a8",
    "static_quant",
    "to_int8",
    "vocab_parallel_embedding",
]
