"""Calls of operators that CANN's documents allow.

`LEGAL` has the arguments of an allowed call, in the C interface's order, with the names in the
operator's row in vnpu. From it follow calls that break a rule (`generated_calls`, `illegal_calls`)
and calls at a rule's edge (`edge_calls`). Nothing is launched, because an operator's first phase
checks its arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from vllm_davinci_testing.operators import aclnn

A2, A3, A310P = "Ascend910B3", "Ascend910_9391", "Ascend310P3"


@dataclass(frozen=True)
class Operand:
    """A tensor on the device.

    apart: True if rows have a gap, as in a divided projection
    by_columns: True if column-major
    """

    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    apart: bool = False
    is_tiled: bool = False
    by_columns: bool = False

    def __call__(self, **changes: Any) -> Operand:
        return Operand(**{**self.__dict__, **changes})


def ints(*values: int) -> tuple[int, ...]:
    return values


def t(*sizes: int, dtype: str = "bfloat16") -> Operand:
    return Operand(sizes, dtype)


def f32(*sizes: int) -> Operand:
    return Operand(sizes, "float32")


def f16(*sizes: int) -> Operand:
    return Operand(sizes, "float16")


def i8(*sizes: int) -> Operand:
    return Operand(sizes, "int8")


def i32(*sizes: int) -> Operand:
    return Operand(sizes, "int32")


def i64(*sizes: int) -> Operand:
    return Operand(sizes, "int64")


def byte(value: int) -> ctypes.c_int8:
    return ctypes.c_int8(value)


def word(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


ALL = 2**31 - 1
MASK = Operand((2048, 2048), "int8")
_BEFORE_LENGTHS = {"bias": None, "mask": MASK}
_AFTER_LENGTHS = dict.fromkeys(
    (
        "dequant_scores",
        "quant_weights",
        "dequant_values",
        "out_scale",
        "out_offset",
        "scale_of_both",
        "offset_of_both",
    )
)
_AFTER_TABLE = dict.fromkeys(
    (
        "query_padding",
        "key_padding",
        "key_scale",
        "key_offset",
        "value_scale",
        "value_offset",
        "key_prefix",
        "value_prefix",
        "prefix_length",
    )
)
# Two requests with 3 and 4 new tokens over a paged cache; 8 query heads, 2 key heads.
_ATTENTION = {
    "query": t(7, 8, 128),
    "key": [t(6, 128, 256)],
    "value": [t(6, 128, 256)],
    **_BEFORE_LENGTHS,
    "query_lengths": ints(3, 7),
    "key_lengths": ints(130, 4),
    **_AFTER_LENGTHS,
    "block_table": i32(2, 2),
    **_AFTER_TABLE,
}
_ATTENTION_NUMBERS = {
    "query_heads": 8,
    "scale": 0.1,
    "pre_tokens": ALL,
    "next_tokens": ALL,
    "layout": "TND",
    "key_heads": 2,
    "sparse_mode": 3,
    "inner_precise": 0,
    "block_size": 128,
    "mode_of_both": 0,
    "wants_lse": False,
    "key_mode": 0,
    "value_mode": 0,
    "out": t(7, 8, 128),
    "lse": f32(0),
}
_ROPE = {"query_rope": None, "key_rope": None, "rope_scale": None}
# Calls of the version with sinks, which has one more tensor before and after the numbers.
_SINK = {"query_scale": None, "sink": t(8)}
_OUTS = ("out", "lse")
_NUMBERS_WITH_SINK = {
    **{name: each for name, each in _ATTENTION_NUMBERS.items() if name not in _OUTS},
    "query_mode": 0,
    "out": t(7, 8, 128),
    "lse": f32(0),
}
# Two requests with one new token each, over compressed rows.
DECODE = {
    "query": t(2, 16, 512),
    "key": [t(6, 128, 512)],
    "value": [t(6, 128, 512)],
    "mask": None,
    "query_lengths": ints(1, 2),
    "query_rope": t(2, 16, 64),
    "key_rope": t(6, 128, 64),
    "query_heads": 16,
    "layout": "TND_NTD",
    "key_heads": 1,
    "sparse_mode": 0,
    "out": t(16, 2, 512),
}
# Both requests attend only to their own new tokens.
PREFILL = {
    "key": [t(7, 2, 128)],
    "value": [t(7, 2, 128)],
    "key_lengths": ints(3, 7),
    "block_table": None,
    "block_size": 0,
}


def _quant_matmul(tiled: bool) -> dict[str, Any]:
    return {
        "x1": i8(5, 64),
        "x2": Operand((64, 96), "int8", is_tiled=tiled),
        "x1_scale": f32(5),
        "x2_scale": f32(96),
        "y_scale": None,
        "x1_offset": None,
        "x2_offset": None,
        "y_offset": None,
        "bias": None,
        "transpose1": False,
        "transpose2": False,
        "group_size": 0,
        "out": t(5, 96),
    }


def _grouped_matmul(tiled: bool) -> dict[str, Any]:
    return {
        "x": [i8(6, 64)],
        "weight": [Operand((4, 64, 96), "int8", is_tiled=tiled)],
        "bias": None,
        "scale": [t(4, 96)],
        "offset": None,
        "weight_scale": None,
        "weight_offset": None,
        "row_scale": [f32(6)],
        "group_list": i64(4),
        "activation_input": None,
        "activation_scale": None,
        "activation_offset": None,
        "split_item": 3,
        "group_type": 0,
        "group_list_form": 1,
        "activation": 0,
        "tuning": None,
        **({"quant_group_size": 0} if tiled else {}),
        "out": [t(6, 96)],
        "activation_out": None,
        "scale_out": None,
    }


_ROTARY = {
    "positions": i64(7),
    "query": t(7, 8 * 128),
    "key": t(7, 2 * 128),
    "table": t(64, 64),
    "section": ints(0, 0, 0),
    "head_size": 128,
    "half_style": True,
    "query_out": t(7, 8 * 128),
    "key_out": t(7, 2 * 128),
}

# Has a group that does not exist, which is detected after the rules are checked.
_AMONG_RANKS = {
    "group": "none",
    "ranks": 16,
    "rank": 0,
    "experts": 128,
    "tp_group": "",
    "tp_ranks": 0,
    "tp_rank": 0,
    "shard_type": 0,
    "shared": 0,
    "shared_ranks": 0,
}

# fmt: off
LEGAL: dict[str, dict[str, Any]] = {
    "FusedInferAttentionScoreV3": {**_ATTENTION, **_ROPE, **_ATTENTION_NUMBERS},
    "FusedInferAttentionScoreV2": {**_ATTENTION, **_ATTENTION_NUMBERS},
    "FusedInferAttentionScoreV4": {**_ATTENTION, **_ROPE, **_SINK, **_NUMBERS_WITH_SINK},
    "ClippedSwiglu": {
        "x": t(7, 64), "group_index": i64(3), "dim": -1, "alpha": 1.702, "limit": 7.0, "bias": 1.0,
        "interleaved": True, "out": t(7, 32),
    },
    "GridSampler2D": {
        "input": f32(2, 3, 5, 4), "grid": f32(2, 6, 7, 2), "interpolation": 2, "padding": 1,
        "align_corners": False, "out": f32(2, 3, 6, 7),
    },
    "FlashAttentionScore": {
        "query": t(2, 7, 192), "key": t(2, 9, 96), "value": t(2, 9, 64), "bias": None,
        "drop_mask": None, "padding_mask": None, "mask": Operand((7, 9), "bool"), "prefix": None,
        "scale": 0.1, "keep_probability": 1.0, "pre_tokens": ALL, "next_tokens": ALL,
        "query_heads": 4, "layout": "BSH", "inner_precise": 0, "sparse_mode": 0,
        "softmax_max": f32(2, 4, 7, 8), "softmax_sum": f32(2, 4, 7, 8), "softmax_out": t(0),
        "out": t(2, 7, 128),
    },
    "ScatterPaKvCache": {
        "key": t(7, 2, 128), "key_cache": t(3, 128, 2, 128), "slot_mapping": i64(7),
        "value": t(7, 2, 128), "value_cache": t(3, 128, 2, 128), "compress_lens": None,
        "compress_offset": None, "seq_lens": None, "cache_mode": "Norm", "scatter_mode": "None",
        "strides": ints(1, 1), "offsets": ints(0, 0),
    },
    "GatherPaKvCache": {
        "key_cache": t(3, 128, 1, 512), "value_cache": t(3, 128, 1, 64), "block_tables": i32(2, 2),
        "seq_lens": i32(2), "key": t(9, 1, 512), "value": t(9, 1, 64), "seq_offset": i32(2),
        "cache_mode": "Norm", "cumulative": False,
    },
    "LightningIndexer": {
        "query": t(7, 8, 128), "key": t(3, 128, 1, 128), "weights": f32(7, 8),
        "query_lengths": i32(2), "key_lengths": i32(2), "block_table": i32(2, 2),
        "query_layout": "TND", "key_layout": "PA_BSND", "sparse_count": 2048, "sparse_mode": 3,
        "pre_tokens": 2**63 - 1, "next_tokens": 2**63 - 1, "returns_values": False,
        "indices": i32(7, 1, 2048), "values": t(0),
    },
    "SparseFlashAttention": {
        "query": t(7, 8, 512), "key": t(3, 128, 1, 512), "value": t(3, 128, 1, 512),
        "sparse_indices": i32(7, 1, 64), "block_table": i32(2, 2), "query_lengths": i32(2),
        "key_lengths": i32(2), "query_rope": t(7, 8, 64), "key_rope": t(3, 128, 1, 64),
        "scale": 0.05, "sparse_block_size": 1, "query_layout": "TND", "key_layout": "PA_BSND",
        "sparse_mode": 3, "pre_tokens": 2**63 - 1, "next_tokens": 2**63 - 1, "attention_mode": 2,
        "returns_softmax": False, "out": t(7, 8, 512), "softmax_max": f32(0), "softmax_sum": f32(0),
    },
    "KvRmsNormRopeCache": {
        "kv": t(7, 1, 1, 576), "gamma": t(512), "cos": t(7, 1, 1, 64), "sin": t(7, 1, 1, 64),
        "index": i64(7), "rope_cache": t(3, 128, 1, 64), "latent_cache": t(3, 128, 1, 512),
        "rope_scale": None, "latent_scale": None, "rope_offset": None, "latent_offset": None,
        "epsilon": 1e-6, "cache_mode": "PA_BNSD", "wants_rows": False, "rope_out": None,
        "latent_out": None,
    },
    "InterleaveRope": {
        "x": t(7, 16, 1, 64), "cos": t(7, 1, 1, 64), "sin": t(7, 1, 1, 64), "out": t(7, 16, 1, 64),
    },
    "RopeWithSinCosCache": _ROTARY,
    "AttentionUpdate": {
        "lse": [f32(14), f32(14)], "parts": [t(14, 128), t(14, 128)], "wants_lse": 1,
        "out": t(14, 128), "lse_out": f32(14),
    },
    "RmsNorm": {
        "x": t(7, 256), "gamma": t(256), "epsilon": 1e-6, "y": t(7, 256), "rstd": f32(7, 1),
    },
    "AddRmsNorm": {
        "x1": t(7, 256), "x2": t(7, 256), "gamma": t(256), "epsilon": 1e-6, "y": t(7, 256),
        "rstd": f32(7, 1), "x": t(7, 256),
    },
    "AddRmsNormDynamicQuantV2": {
        "x1": t(7, 256), "x2": t(7, 256), "gamma": t(256), "smooth_scale1": t(256),
        "smooth_scale2": t(256), "beta": t(256), "epsilon": 1e-6, "output_mask": None,
        "y1": i8(7, 256), "y2": i8(7, 256), "x": t(7, 256), "scale1": f32(7), "scale2": f32(7),
    },
    "SwiGlu": {"x": t(7, 256), "dim": -1, "out": t(7, 128)},
    "Embedding": {"weight": t(100, 64), "indices": i64(7), "out": t(7, 64)},
    "Mm": {"self": t(7, 64), "mat2": t(64, 96), "out": t(7, 96), "type": byte(0)},
    "Matmul": {"self": t(7, 64), "mat2": t(64, 96), "out": t(7, 96), "type": byte(0)},
    "AddLora": {
        "y": f16(7, 96), "x": f16(7, 64), "weight_b": f16(4, 2, 64, 16), "indices": i32(7),
        "weight_a": f16(4, 2, 16, 64), "layer_idx": 0, "scale": 1.0, "y_offset": 0,
        "y_slice_size": 64, "out": f16(7, 96),
    },
    "Addmm": {
        "self": t(96), "mat1": t(7, 64), "mat2": t(64, 96), "beta": aclnn.Number(1.0),
        "alpha": aclnn.Number(1.0), "out": t(7, 96), "type": byte(0),
    },
    "Baddbmm": {
        "self": t(2, 7, 96), "batch1": t(2, 7, 64), "batch2": t(2, 64, 96),
        "beta": aclnn.Number(1.0), "alpha": aclnn.Number(1.0), "out": t(2, 7, 96), "type": byte(0),
    },
    "BatchMatMul": {"self": t(2, 7, 64), "mat2": t(2, 64, 96), "out": t(2, 7, 96), "type": byte(0)},
    "TransposeBatchMatMul": {
        "x1": t(7, 16, 128), "x2": t(16, 128, 512), "bias": None, "scale": None,
        "permute_x1": ints(1, 0, 2), "permute_x2": ints(0, 1, 2), "permute_y": ints(1, 0, 2),
        "type": byte(0), "split": word(1), "out": t(7, 16, 512),
    },
    "QuantMatmulV5": _quant_matmul(False),
    "QuantMatmulWeightNz": _quant_matmul(True),
    "WeightQuantBatchMatmulV2": {
        "x": t(7, 64), "weight": i8(64, 96), "scale": t(96), "offset": t(96), "out_scale": None,
        "out_offset": None, "bias": f32(96), "group_size": word(0), "out": t(7, 96),
    },
    "GroupedMatmulV5": _grouped_matmul(False),
    "GroupedMatmulWeightNz": _grouped_matmul(True),
    "DynamicQuant": {"x": t(7, 64), "smooth": None, "y": i8(7, 64), "scale": f32(7)},
    "DynamicQuantV2": {
        "x": t(7, 64), "smooth": None, "groups": None, "type": 2, "y": i8(7, 64), "scale": f32(7),
        "offset": f32(7),
    },
    "Quantize": {
        "x": t(7, 64), "scales": f32(64), "zero_points": i32(64), "type": word(2), "axis": word(-1),
        "out": i8(7, 64),
    },
    "AscendQuantV3": {
        "x": t(7, 64), "scale": t(64), "offset": t(64), "squared": False, "round_mode": "round",
        "type": word(2), "axis": word(-1), "y": i8(7, 64),
    },
    "DequantBias": {
        "x": i32(7, 64), "weight_scale": t(64), "activation_scale": f32(7), "bias": None,
        "type": 27, "out": t(7, 64),
    },
    "DequantSwigluQuant": {
        "x": i32(7, 256), "weight_scale": f32(4, 256), "activation_scale": f32(7), "bias": None,
        "quant_scale": None, "quant_offset": None, "group_index": i64(4), "activate_left": True,
        "quant_mode": "dynamic", "y": i8(7, 128), "scale": f32(7),
    },
    "MoeInitRoutingV3": {
        "x": t(7, 64), "expert_index": i32(7, 2), "scale": None, "offset": None, "active_rows": 14,
        "capacity": 0, "experts": 8, "drop_pad_mode": 0, "count_form": 1, "wants_counts": True,
        "quant_mode": -1, "active_range": ints(0, 8), "row_index_type": 0, "x_out": t(14, 64),
        "row_index_out": i32(14), "counts_out": i64(8), "scale_out": None,
    },
    "MoeGatingTopK": {
        "x": f32(7, 64), "bias": f32(64), "k": 4, "chosen_groups": 2, "groups": 8, "group_score": 1,
        "renormalize": 0, "activation": 1, "wants_scores": False, "scaling_factor": 1.0,
        "epsilon": 1e-20, "y": f32(7, 4), "expert_index": i32(7, 4), "scores": f32(7, 64),
    },
    "MoeGatingTopKSoftmaxV2": {
        "x": t(7, 64), "finished": None, "k": 4, "renormalize": 0, "wants_softmax": False,
        "y": t(7, 4), "expert_index": i32(7, 4), "softmax_out": None,
    },
    "MoeFinalizeRoutingV2": {
        "rows": t(14, 64), "row_index": i32(14), "skip1": None, "skip2": None, "bias": None,
        "scales": t(7, 2), "expert_index": None, "drop_pad_mode": 2, "out": t(7, 64),
    },
    "MoeDistributeDispatchV2": {
        "x": t(8, 1024), "expert_ids": i32(8, 8), "smooth": None, "active": None, "weights": None,
        **_AMONG_RANKS, "quant_mode": 2, "global_tokens": 0, "counts_type": 1, "algorithm": "",
        "rows": i8(1024, 1024), "row_scales": f32(1024), "triples": i32(1024 * 128),
        "tokens_per_expert": i64(8), "ends": i32(8 * 16), "total": None, "row_weights": None,
    },
    "MoeDistributeCombineV2": {
        "rows": t(1024, 1024), "expert_ids": i32(8, 8), "triples": i32(1024 * 128),
        "ends": i32(8 * 16), "weights": f32(8, 8), "tp_ends": None, "active": None,
        "activation_scale": None, "weight_scale": None, "group_list": None, "row_scales": None,
        "shared_x": None, **_AMONG_RANKS, "global_tokens": 0, "out_dtype": 0, "quant_mode": 0,
        "group_list_type": 0, "algorithm": "", "sums": t(8, 1024),
    },
    "MoeReRouting": {
        "tokens": t(7, 64), "counts": i32(2, 4), "scales": f32(7), "count_form": 1, "index_type": 0,
        "tokens_out": t(7, 64), "scales_out": f32(7), "index_out": i32(7), "counts_out": i32(4),
    },
}
# fmt: on


def tensor_list(dtype: str = "float16") -> list[Operand]:
    return [Operand((3,), dtype), Operand((2, 4), dtype)]


LEGAL |= {"ForeachCopy": {"x": tensor_list(), "out": tensor_list()}}
_TWO = {"self": t(7, 64), "other": t(7, 64), "alpha": aclnn.Number(1.0), "out": t(7, 64)}
_NUMBER = {**_TWO, "other": aclnn.Number(2.0)}
_FUNCTION = {"self": t(7, 64), "out": t(7, 64)}


def of_bools(*sizes: int) -> Operand:
    return Operand(sizes, "bool")


_COMPARED = {"self": t(7, 64), "other": t(7, 64), "out": of_bools(7, 64)}
_BITS = {"self": i64(7, 64), "other": i64(7, 64), "out": i64(7, 64)}
_SCATTERED = {"self": t(7, 64), "dim": 0, "index": i64(5, 64)}

# fmt: off
LEGAL |= {
    "Add": _TWO,
    "InplaceAdd": {name: _TWO[name] for name in ("self", "other", "alpha")},
    "Adds": _NUMBER,
    "Abs": _FUNCTION,
    "Ceil": _FUNCTION,
    "Exp2": _FUNCTION,
    "Round": _FUNCTION,
    "DivMods": {"self": t(7, 64), "other": aclnn.Number(2.0), "mode": 2, "out": t(7, 64)},
    "FloorDivides": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": t(7, 64)},
    "Addcmul": {
        **dict.fromkeys(("self", "tensor1", "tensor2"), t(7, 64)), "value": aclnn.Number(1.0),
        "out": t(7, 64),
    },
    "ClampMax": {"self": t(7, 64), "clip_max": aclnn.Number(0.0), "out": t(7, 64)},
    "Flip": {"self": t(7, 64), "dims": ints(0), "out": t(7, 64)},
    "NonzeroV2": {"self": t(7, 64), "out": i64(2, 448)},
    "RepeatInterleave": {"self": t(7), "repeats": i64(7), "output_size": 7, "out": t(7)},
    "AvgPool2d": {
        "self": t(2, 3, 8, 8), "kernel_size": ints(2, 2), "strides": ints(2, 2),
        "paddings": ints(0, 0), "ceil_mode": False, "count_include_pad": True,
        "divisor_override": 0, "cube": byte(0), "out": t(2, 3, 4, 4),
    },
    "Divs": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": t(7, 64)},
    "Rsubs": _NUMBER,
    "LtScalar": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": of_bools(7, 64)},
    "EqScalar": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": of_bools(7, 64)},
    "NeTensor": _COMPARED,
    "LtTensor": _COMPARED,
    "LeTensor": _COMPARED,
    "BitwiseAndTensor": _BITS,
    "EqTensor": _COMPARED,
    "GtTensor": _COMPARED,
    "GeTensor": _COMPARED,
    "GtScalar": {**_COMPARED, "other": aclnn.Number(2.0)},
    "GeScalar": {**_COMPARED, "other": aclnn.Number(2.0)},
    "Equal": {**_COMPARED, "out": of_bools(1)},
    "LogicalNot": {"self": of_bools(7, 64), "out": of_bools(7, 64)},
    "LogicalOr": {name: of_bools(7, 64) for name in _COMPARED},
    "InplaceLogicalOr": {"self": of_bools(7, 64), "other": of_bools(7, 64)},
    "BitwiseAndScalar": {**_BITS, "other": aclnn.Number(2)},
    "InplaceBitwiseAndTensor": {name: _BITS[name] for name in ("self", "other")},
    "InplaceBitwiseAndScalar": {"self": i64(7, 64), "other": aclnn.Number(2)},
    "BitwiseOrTensor": _BITS,
    "BitwiseNot": {"self": i64(7, 64), "out": i64(7, 64)},
    "RightShift": _BITS,
    "Neg": _FUNCTION,
    "Exp": _FUNCTION,
    "Rsqrt": _FUNCTION,
    "Softplus": {
        "self": t(7, 64), "beta": aclnn.Number(1.0), "threshold": aclnn.Number(20.0),
        "out": t(7, 64),
    },
    "PowTensorScalar": {"self": t(7, 64), "exponent": aclnn.Number(2.0), "out": t(7, 64)},
    "PowScalarTensor": {"self": aclnn.Number(2.0), "exponent": t(7, 64), "out": t(7, 64)},
    "RemainderTensorScalar": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": t(7, 64)},
    "InplaceAddcmul": {
        **dict.fromkeys(("self", "tensor1", "tensor2"), t(7, 64)), "value": aclnn.Number(1.0),
    },
    "ClampMin": {"self": t(7, 64), "clip_min": aclnn.Number(0.0), "out": t(7, 64)},
    "InplaceCopy": {"self": t(7, 64), "src": t(7, 64)},
    "Stack": {"tensors": [t(7, 64), t(7, 64)], "dim": 0, "out": t(2, 7, 64)},
    "RepeatInterleaveInt": {"self": t(7, 64), "repeats": 2, "output_size": 896, "out": t(896)},
    "RepeatInterleaveIntWithDim": {
        "self": t(7, 64), "repeats": 2, "dim": 0, "output_size": 14, "out": t(14, 64),
    },
    "ConstantPadNd": {
        "self": t(7, 64), "pad": ints(0, 0, 0, 1), "value": aclnn.Number(0.0), "out": t(8, 64),
    },
    "Linspace": {"start": aclnn.Number(0.0), "end": aclnn.Number(6.0), "steps": 7, "out": f32(7)},
    "OneHot": {
        "self": i64(7), "num_classes": word(5), "on": f32(1), "off": f32(1), "axis": -1,
        "out": f32(7, 5),
    },
    "UpsampleBilinear2d": {
        "self": t(2, 3, 5, 4), "output_size": ints(6, 7), "align_corners": False, "scales_h": 0.0,
        "scales_w": 0.0, "out": t(2, 3, 6, 7),
    },
    "Eye": {"rows": 7, "columns": 64, "out": t(7, 64)},
    "IndexPutImpl": {
        "self": t(7, 64), "indices": [i64(5)], "values": t(5, 64), "accumulate": False,
        "unsafe": False,
    },
    "InplaceIndexCopy": {"self": t(7, 64), "dim": 0, "index": i64(5), "source": t(5, 64)},
    "InplaceIndexFill": {"self": t(7, 64), "dim": 0, "index": i64(5), "value": aclnn.Number(0.0)},
    "Scatter": {**_SCATTERED, "src": t(5, 64), "reduce": 0, "out": t(7, 64)},
    "ScatterAdd": {**_SCATTERED, "src": t(5, 64), "out": t(7, 64)},
    "ScatterValue": {**_SCATTERED, "value": aclnn.Number(0.0), "reduce": 0, "out": t(7, 64)},
    "ScatterNdUpdate": {"self": t(7, 64), "indices": i64(5, 1), "updates": t(5, 64)},
    "Amax": {"self": t(7, 64), "dims": ints(1), "keep_dim": False, "out": t(7)},
    "Mean": {"self": t(7, 64), "dims": ints(1), "keep_dims": False, "dtype": word(27), "out": t(7)},
    "LinalgVectorNorm": {
        "self": t(7, 64), "ord": aclnn.Number(2.0), "dims": ints(1), "keep_dims": False,
        "dtype": word(27), "out": t(7),
    },
    "Cumprod": {
        "input": t(7, 64), "dim": aclnn.Number(1, torch.int64), "dtype": word(27), "out": t(7, 64),
    },
    "InplaceNormal": {
        "self": t(7, 64), "mean": ctypes.c_float(0.0), "std": ctypes.c_float(1.0), "seed": 1,
        "offset": 0,
    },
    "Clamp": {
        "self": t(7, 64), "least": aclnn.Number(0.0), "most": aclnn.Number(1.0), "out": t(7, 64),
    },
    "Any": {"self": of_bools(7, 64), "dims": ints(1), "keep_dims": False, "out": of_bools(7)},
    "All": {"self": of_bools(7, 64), "dims": ints(1), "keep_dims": False, "out": of_bools(7)},
    "Max": {"self": t(7, 64), "out": t()},
    "MaxDim": {"self": t(7, 64), "dim": 1, "keep_dim": False, "out": t(7), "indices": i64(7)},
    "Min": {"self": t(7, 64), "out": t()},
    "Nonzero": {"self": t(7, 64), "out": i64(448, 2)},
    "InplaceMaskedFillScalar": {
        "self": t(7, 64), "mask": of_bools(7, 64), "value": aclnn.Number(2.0),
    },
    "SWhere": {"condition": of_bools(7, 64), "self": t(7, 64), "other": t(7, 64), "out": t(7, 64)},
    "Cos": _FUNCTION,
    "InplaceLog": {"self": t(7, 64)},
    "InplaceRelu": {"self": t(7, 64)},
    "Gelu": _FUNCTION,
    "Tanh": _FUNCTION,
    "GeluV2": {"x": t(7, 64), "approximate": 0, "out": t(7, 64)},
    "InplaceFillScalar": {"self": t(7, 64), "value": aclnn.Number(2.0)},
    "InplaceZero": {"self": t(7, 64)},
    "InplaceOne": {"self": t(7, 64)},
    "Arange": {
        "start": aclnn.Number(0.0), "end": aclnn.Number(7.0), "step": aclnn.Number(1.0),
        "out": i64(7),
    },
    "Cast": {"self": t(7, 64), "dtype": word(0), "out": f32(7, 64)},
    "Cat": {"tensors": [t(7, 64), t(7, 64)], "dim": 0, "out": t(14, 64)},
    "Repeat": {"self": t(7, 64), "repeats": ints(2, 1), "out": t(14, 64)},
    "Triu": {"self": t(7, 64), "diagonal": 0, "out": t(7, 64)},
    # The first dimension is not indexed.
    "Index": {"self": t(7, 64), "indices": [f32(0), i64(5)], "out": t(7, 5)},
    "IndexAdd": {
        "self": t(7, 64), "dim": 0, "index": i64(5), "source": t(5, 64), "alpha": aclnn.Number(1.0),
        "out": t(7, 64),
    },
    "IndexSelect": {"self": t(7, 64), "dim": 0, "index": i64(5), "out": t(5, 64)},
    "Gather": {"self": t(7, 64), "dim": 0, "index": i64(5, 64), "out": t(5, 64)},
    "InplaceScatter": {
        "self": t(7, 64), "dim": 0, "index": i64(5, 64), "src": t(5, 64), "reduce": 0,
    },
    "Sort": {
        "self": t(7, 64), "stable": True, "dim": -1, "descending": False, "values": t(7, 64),
        "indices": i64(7, 64),
    },
    "Topk": {
        "self": t(7, 64), "k": 5, "dim": -1, "largest": True, "sorted": True, "values": t(7, 5),
        "indices": i64(7, 5),
    },
    "LogSumExp": {"self": t(7, 64), "dims": ints(1), "keep_dim": False, "out": t(7)},
    "ReduceSum": {
        "self": t(7, 64), "dims": ints(1), "keep_dims": False, "dtype": word(27), "out": t(7),
    },
    "Cumsum": {"self": t(7, 64), "dim": 1, "dtype": word(27), "out": t(7, 64)},
    "ArgMax": {"self": t(7, 64), "dim": -1, "keep_dim": False, "out": i64(7)},
    "Softmax": {"self": t(7, 64), "dim": -1, "out": t(7, 64)},
    "InplaceRandom": {"self": t(7, 64), "from": 0, "to": 100, "seed": 1, "offset": 0},
    "InplaceUniform": {"self": t(7, 64), "from": 0.0, "to": 1.0, "seed": 1, "offset": 0},
    "LayerNorm": {
        "input": t(7, 64), "normalized_shape": ints(64), "weight": t(64), "bias": t(64),
        "epsilon": 1e-5, "out": t(7, 64), "mean_out": None, "rstd_out": None,
    },
    "FastLayerNorm": {
        "input": t(7, 64), "normalized_shape": ints(64), "weight": t(64), "bias": t(64),
        "epsilon": 1e-5, "out": t(7, 64), "mean_out": None, "rstd_out": None,
    },
    "Convolution": {
        "input": t(2, 3, 16, 16), "weight": t(8, 3, 4, 4), "bias": t(8), "stride": ints(4, 4),
        "padding": ints(0, 0), "dilation": ints(1, 1), "transposed": False,
        "output_padding": ints(0, 0), "groups": 1, "out": t(2, 8, 4, 4), "type": byte(0),
    },
}
# fmt: on


def _inserted(operator: str, after: str, **more: Any) -> dict[str, Any]:
    """Returns a legal call with additional arguments after one of its own."""
    made: dict[str, Any] = {}
    for name, value in LEGAL[operator].items():
        made[name] = value
        if name == after:
            made |= more
    return made


def _without(operator: str, *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in LEGAL[operator].items() if name not in left_out}


# Operators that share another operator's rules: its other versions, and similar functions. fmt: off
LEGAL |= {
    **dict.fromkeys(("Reciprocal", "Relu", "Sigmoid", "Silu", "Sin"), _FUNCTION),
    **{name: _without("Add", "alpha") for name in ("Mul", "Div")},
    **{f"Inplace{name}": _without("Add", "alpha", "out") for name in ("Mul", "Div")},
    "Sub": _TWO,
    "InplaceSub": _without("Add", "out"),
    "Subs": _NUMBER,
    "Muls": LEGAL["Divs"],
    **{f"Inplace{name}": _without("Adds", "out") for name in ("Adds", "Subs")},
    **{f"Inplace{name}": _without("Divs", "out") for name in ("Muls", "Divs")},
    "NeScalar": LEGAL["LtScalar"],
    "LogSoftmax": LEGAL["Softmax"],
    "AscendQuant": _without("AscendQuantV3", "axis"),
    "RopeWithSinCosCacheV2": _inserted("RopeWithSinCosCache", "half_style", cache_mode=0),
    "GroupedMatmulV4": _without("GroupedMatmulV5", "tuning"),
    "WeightQuantBatchMatmulV3": _inserted(
        "WeightQuantBatchMatmulV2", "group_size", inner_precise=word(0)
    ),
    "DequantSwigluQuantV2": _inserted(
        "DequantSwigluQuant",
        "quant_mode",
        dst_type=2,
        round_mode="rint",
        activate_dim=-1,
        swiglu_mode=0,
        clamp_limit=7.0,
        glu_alpha=1.702,
        glu_bias=1.0,
    ),
    "FusedInferAttentionScoreV5": {
        **_ATTENTION,
        **_ROPE,
        **_SINK,
        "query_starts": None,
        "key_starts": None,
        **{name: _NUMBERS_WITH_SINK[name] for name in _ATTENTION_NUMBERS if name not in _OUTS},
        "query_mode": 0,
        "scores_type": 0,
        **{name: _NUMBERS_WITH_SINK[name] for name in _OUTS},
    },
    "MoeDistributeDispatch": _without("MoeDistributeDispatchV2", "algorithm"),
    "MoeDistributeCombine": _without("MoeDistributeCombineV2", "shared_x", "algorithm"),
}
# fmt: on


# Operators that share another operator's rules.
RELATIVES = {
    "RopeWithSinCosCacheV2": "RopeWithSinCosCache",
    "GroupedMatmulV4": "GroupedMatmulV5",
    "WeightQuantBatchMatmulV3": "WeightQuantBatchMatmulV2",
    "DequantSwigluQuantV2": "DequantSwigluQuant",
    "FusedInferAttentionScoreV5": "FusedInferAttentionScoreV4",
    "MoeDistributeDispatch": "MoeDistributeDispatchV2",
    "MoeDistributeCombine": "MoeDistributeCombineV2",
}
