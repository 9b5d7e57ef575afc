"""Defines each operator of vllm-davinci-kernels in plain torch: same names, arguments and results.

The functions run on any device. Norms, softmax and products accumulate in fp32; results are rounded
once to the dtype of the output. Tests, benchmarks and `vllm-davinci verify` compare with them. The
modules also define what single operators of CANN compute.
"""

from vllm_davinci.operators.attention import (
    mla_decode_attention,
    paged_attention,
    prefill_attention,
)
from vllm_davinci.operators.block_fp8 import block_fp8_floats, block_fp8_integers
from vllm_davinci.operators.experts import (
    experts,
    experts_w8a8,
    routed_experts,
    routed_experts_w8a8,
)
from vllm_davinci.operators.kv_cache import copy_kv_blocks
from vllm_davinci.operators.mla import mla_preprocess, mla_preprocess_w8a8
from vllm_davinci.operators.norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    add_rms_norm_quant,
    rms_norm,
)
from vllm_davinci.operators.rotary import rotary_embedding
from vllm_davinci.operators.rows import (
    attend_to_rows,
    choose_rows,
    compress_tokens,
    rotate_pairs,
    row_numbers,
)
from vllm_davinci.operators.streams import collapse_streams, expand_streams
from vllm_davinci.operators.vocabulary import vocab_parallel_embedding

__all__ = [
    "add_rms_norm",
    "add_rms_norm_dynamic_quant",
    "add_rms_norm_quant",
    "attend_to_rows",
    "block_fp8_floats",
    "block_fp8_integers",
    "choose_rows",
    "collapse_streams",
    "compress_tokens",
    "copy_kv_blocks",
    "expand_streams",
    "experts",
    "experts_w8a8",
    "mla_decode_attention",
    "mla_preprocess",
    "mla_preprocess_w8a8",
    "paged_attention",
    "prefill_attention",
    "rms_norm",
    "rotary_embedding",
    "rotate_pairs",
    "routed_experts",
    "routed_experts_w8a8",
    "row_numbers",
    "vocab_parallel_embedding",
]
