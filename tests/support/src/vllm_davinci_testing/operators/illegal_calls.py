"""Calls of operators that CANN's documents do not allow, each beside one that they do.

`LEGAL` has the arguments of a call that passes, in the order of the C interface and under the names
of the operator's row in vnpu; a case changes some of them. Nothing is launched: the first phase of
an operator says what it takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_davinci_testing.operators import aclnn

PARAMETER = 161002
TILING = 561002

A2, A3, A310P = "Ascend910B3", "Ascend910_9391", "Ascend310P3"


@dataclass(frozen=True)
class Operand:
    """A tensor on the device.

    apart:      its rows have a gap, as those of a divided projection
    by_columns: its entries lie column by column
    """

    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    apart: bool = False
    is_tiled: bool = False
    by_columns: bool = False

    def __call__(self, **changes: Any) -> Operand:
        return Operand(**{**self.__dict__, **changes})


@dataclass(frozen=True)
class Case:
    """
    operator: without aclnn
    argument: that the refusal names
    rule:     a part of the rule that it states
    changes:  arguments in place of those of the legal call
    code:     status of CANN
    """

    operator: str
    argument: str
    rule: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    code: int = PARAMETER
    soc: str = A2
    cann: str = "8.5"

    @property
    def id(self) -> str:
        changed = "-".join(self.changes)
        return f"{self.operator}-{self.argument}-{self.rule[:40]}-{changed}-{self.soc}-{self.cann}"


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
# Two requests of 3 and 4 new tokens over a paged cache, 8 heads over 2.
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
# Of the version that takes sinks: one more tensor on each side of the numbers.
_SINK = {"query_scale": None, "sink": t(8)}
_OUTS = ("out", "lse")
_NUMBERS_WITH_SINK = {
    **{name: each for name, each in _ATTENTION_NUMBERS.items() if name not in _OUTS},
    "query_mode": 0,
    "out": t(7, 8, 128),
    "lse": f32(0),
}
# One new token of each of two requests over compressed rows.
_DECODE = {
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
# Both requests over themselves.
_PREFILL = {
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

# Of a group that is not there, which is found out after the rules were held.
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

LEGAL: dict[str, dict[str, Any]] = {
    "FusedInferAttentionScoreV3": {**_ATTENTION, **_ROPE, **_ATTENTION_NUMBERS},
    "FusedInferAttentionScoreV2": {**_ATTENTION, **_ATTENTION_NUMBERS},
    "FusedInferAttentionScoreV4": {**_ATTENTION, **_ROPE, **_SINK, **_NUMBERS_WITH_SINK},
    "ClippedSwiglu": {
        "x": t(7, 64),
        "group_index": i64(3),
        "dim": -1,
        "alpha": 1.702,
        "limit": 7.0,
        "bias": 1.0,
        "interleaved": True,
        "out": t(7, 32),
    },
    "GridSampler2D": {
        "input": f32(2, 3, 5, 4),
        "grid": f32(2, 6, 7, 2),
        "interpolation": 2,
        "padding": 1,
        "align_corners": False,
        "out": f32(2, 3, 6, 7),
    },
    "ScatterPaKvCache": {
        "key": t(7, 2, 128),
        "key_cache": t(3, 128, 2, 128),
        "slot_mapping": i64(7),
        "value": t(7, 2, 128),
        "value_cache": t(3, 128, 2, 128),
        "compress_lens": None,
        "compress_offset": None,
        "seq_lens": None,
        "cache_mode": "Norm",
        "scatter_mode": "None",
        "strides": ints(1, 1),
        "offsets": ints(0, 0),
    },
    "GatherPaKvCache": {
        "key_cache": t(3, 128, 1, 512),
        "value_cache": t(3, 128, 1, 64),
        "block_tables": i32(2, 2),
        "seq_lens": i32(2),
        "key": t(9, 1, 512),
        "value": t(9, 1, 64),
        "seq_offset": i32(2),
        "cache_mode": "Norm",
        "cumulative": False,
    },
    "LightningIndexer": {
        "query": t(7, 8, 128),
        "key": t(3, 128, 1, 128),
        "weights": f32(7, 8),
        "query_lengths": i32(2),
        "key_lengths": i32(2),
        "block_table": i32(2, 2),
        "query_layout": "TND",
        "key_layout": "PA_BSND",
        "sparse_count": 2048,
        "sparse_mode": 3,
        "pre_tokens": 2**63 - 1,
        "next_tokens": 2**63 - 1,
        "returns_values": False,
        "indices": i32(7, 1, 2048),
        "values": t(0),
    },
    "SparseFlashAttention": {
        "query": t(7, 8, 512),
        "key": t(3, 128, 1, 512),
        "value": t(3, 128, 1, 512),
        "sparse_indices": i32(7, 1, 64),
        "block_table": i32(2, 2),
        "query_lengths": i32(2),
        "key_lengths": i32(2),
        "query_rope": t(7, 8, 64),
        "key_rope": t(3, 128, 1, 64),
        "scale": 0.05,
        "sparse_block_size": 1,
        "query_layout": "TND",
        "key_layout": "PA_BSND",
        "sparse_mode": 3,
        "pre_tokens": 2**63 - 1,
        "next_tokens": 2**63 - 1,
        "attention_mode": 2,
        "returns_softmax": False,
        "out": t(7, 8, 512),
        "softmax_max": f32(0),
        "softmax_sum": f32(0),
    },
    "KvRmsNormRopeCache": {
        "kv": t(7, 1, 1, 576),
        "gamma": t(512),
        "cos": t(7, 1, 1, 64),
        "sin": t(7, 1, 1, 64),
        "index": i64(7),
        "rope_cache": t(3, 128, 1, 64),
        "latent_cache": t(3, 128, 1, 512),
        "rope_scale": None,
        "latent_scale": None,
        "rope_offset": None,
        "latent_offset": None,
        "epsilon": 1e-6,
        "cache_mode": "PA_BNSD",
        "wants_rows": False,
        "rope_out": None,
        "latent_out": None,
    },
    "InterleaveRope": {
        "x": t(7, 16, 1, 64),
        "cos": t(7, 1, 1, 64),
        "sin": t(7, 1, 1, 64),
        "out": t(7, 16, 1, 64),
    },
    "RopeWithSinCosCache": _ROTARY,
    "AttentionUpdate": {
        "lse": [f32(14), f32(14)],
        "parts": [t(14, 128), t(14, 128)],
        "wants_lse": 1,
        "out": t(14, 128),
        "lse_out": f32(14),
    },
    "RmsNorm": {
        "x": t(7, 256),
        "gamma": t(256),
        "epsilon": 1e-6,
        "y": t(7, 256),
        "rstd": f32(7, 1),
    },
    "AddRmsNorm": {
        "x1": t(7, 256),
        "x2": t(7, 256),
        "gamma": t(256),
        "epsilon": 1e-6,
        "y": t(7, 256),
        "rstd": f32(7, 1),
        "x": t(7, 256),
    },
    "AddRmsNormDynamicQuantV2": {
        "x1": t(7, 256),
        "x2": t(7, 256),
        "gamma": t(256),
        "smooth_scale1": t(256),
        "smooth_scale2": t(256),
        "beta": t(256),
        "epsilon": 1e-6,
        "output_mask": None,
        "y1": i8(7, 256),
        "y2": i8(7, 256),
        "x": t(7, 256),
        "scale1": f32(7),
        "scale2": f32(7),
    },
    "SwiGlu": {"x": t(7, 256), "dim": -1, "out": t(7, 128)},
    "Embedding": {"weight": t(100, 64), "indices": i64(7), "out": t(7, 64)},
    "Mm": {"self": t(7, 64), "mat2": t(64, 96), "out": t(7, 96), "type": byte(0)},
    "Matmul": {"self": t(7, 64), "mat2": t(64, 96), "out": t(7, 96), "type": byte(0)},
    "AddLora": {
        "y": f16(7, 96),
        "x": f16(7, 64),
        "weight_b": f16(4, 2, 64, 16),
        "indices": i32(7),
        "weight_a": f16(4, 2, 16, 64),
        "layer_idx": 0,
        "scale": 1.0,
        "y_offset": 0,
        "y_slice_size": 64,
        "out": f16(7, 96),
    },
    "Addmm": {
        "self": t(96),
        "mat1": t(7, 64),
        "mat2": t(64, 96),
        "beta": aclnn.Number(1.0),
        "alpha": aclnn.Number(1.0),
        "out": t(7, 96),
        "type": byte(0),
    },
    "BatchMatMul": {"self": t(2, 7, 64), "mat2": t(2, 64, 96), "out": t(2, 7, 96), "type": byte(0)},
    "TransposeBatchMatMul": {
        "x1": t(7, 16, 128),
        "x2": t(16, 128, 512),
        "bias": None,
        "scale": None,
        "permute_x1": ints(1, 0, 2),
        "permute_x2": ints(0, 1, 2),
        "permute_y": ints(1, 0, 2),
        "type": byte(0),
        "split": word(1),
        "out": t(7, 16, 512),
    },
    "QuantMatmulV5": _quant_matmul(False),
    "QuantMatmulWeightNz": _quant_matmul(True),
    "WeightQuantBatchMatmulV2": {
        "x": t(7, 64),
        "weight": i8(64, 96),
        "scale": t(96),
        "offset": t(96),
        "out_scale": None,
        "out_offset": None,
        "bias": f32(96),
        "group_size": word(0),
        "out": t(7, 96),
    },
    "GroupedMatmulV5": _grouped_matmul(False),
    "GroupedMatmulWeightNz": _grouped_matmul(True),
    "DynamicQuant": {"x": t(7, 64), "smooth": None, "y": i8(7, 64), "scale": f32(7)},
    "DynamicQuantV2": {
        "x": t(7, 64),
        "smooth": None,
        "groups": None,
        "type": 2,
        "y": i8(7, 64),
        "scale": f32(7),
        "offset": f32(7),
    },
    "Quantize": {
        "x": t(7, 64),
        "scales": f32(64),
        "zero_points": i32(64),
        "type": word(2),
        "axis": word(-1),
        "out": i8(7, 64),
    },
    "AscendQuantV3": {
        "x": t(7, 64),
        "scale": t(64),
        "offset": t(64),
        "squared": False,
        "round_mode": "round",
        "type": word(2),
        "axis": word(-1),
        "y": i8(7, 64),
    },
    "DequantBias": {
        "x": i32(7, 64),
        "weight_scale": t(64),
        "activation_scale": f32(7),
        "bias": None,
        "type": 27,
        "out": t(7, 64),
    },
    "DequantSwigluQuant": {
        "x": i32(7, 256),
        "weight_scale": f32(4, 256),
        "activation_scale": f32(7),
        "bias": None,
        "quant_scale": None,
        "quant_offset": None,
        "group_index": i64(4),
        "activate_left": True,
        "quant_mode": "dynamic",
        "y": i8(7, 128),
        "scale": f32(7),
    },
    "MoeInitRoutingV3": {
        "x": t(7, 64),
        "expert_index": i32(7, 2),
        "scale": None,
        "offset": None,
        "active_rows": 14,
        "capacity": 0,
        "experts": 8,
        "drop_pad_mode": 0,
        "count_form": 1,
        "wants_counts": True,
        "quant_mode": -1,
        "active_range": ints(0, 8),
        "row_index_type": 0,
        "x_out": t(14, 64),
        "row_index_out": i32(14),
        "counts_out": i64(8),
        "scale_out": None,
    },
    "MoeGatingTopK": {
        "x": f32(7, 64),
        "bias": f32(64),
        "k": 4,
        "chosen_groups": 2,
        "groups": 8,
        "group_score": 1,
        "renormalize": 0,
        "activation": 1,
        "wants_scores": False,
        "scaling_factor": 1.0,
        "epsilon": 1e-20,
        "y": f32(7, 4),
        "expert_index": i32(7, 4),
        "scores": f32(7, 64),
    },
    "MoeGatingTopKSoftmaxV2": {
        "x": t(7, 64),
        "finished": None,
        "k": 4,
        "renormalize": 0,
        "wants_softmax": False,
        "y": t(7, 4),
        "expert_index": i32(7, 4),
        "softmax_out": None,
    },
    "MoeFinalizeRoutingV2": {
        "rows": t(14, 64),
        "row_index": i32(14),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": t(7, 2),
        "expert_index": None,
        "drop_pad_mode": 2,
        "out": t(7, 64),
    },
    "MoeDistributeDispatchV2": {
        "x": t(8, 1024),
        "expert_ids": i32(8, 8),
        "smooth": None,
        "active": None,
        "weights": None,
        **_AMONG_RANKS,
        "quant_mode": 2,
        "global_tokens": 0,
        "counts_type": 1,
        "algorithm": "",
        "rows": i8(1024, 1024),
        "row_scales": f32(1024),
        "triples": i32(1024 * 128),
        "tokens_per_expert": i64(8),
        "ends": i32(8 * 16),
        "total": None,
        "row_weights": None,
    },
    "MoeDistributeCombineV2": {
        "rows": t(1024, 1024),
        "expert_ids": i32(8, 8),
        "triples": i32(1024 * 128),
        "ends": i32(8 * 16),
        "weights": f32(8, 8),
        "tp_ends": None,
        "active": None,
        "activation_scale": None,
        "weight_scale": None,
        "group_list": None,
        "row_scales": None,
        "shared_x": None,
        **_AMONG_RANKS,
        "global_tokens": 0,
        "out_dtype": 0,
        "quant_mode": 0,
        "group_list_type": 0,
        "algorithm": "",
        "sums": t(8, 1024),
    },
    "MoeReRouting": {
        "tokens": t(7, 64),
        "counts": i32(2, 4),
        "scales": f32(7),
        "count_form": 1,
        "index_type": 0,
        "tokens_out": t(7, 64),
        "scales_out": f32(7),
        "index_out": i32(7),
        "counts_out": i32(4),
    },
}


def _attention(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("FusedInferAttentionScoreV3", argument, rule, changes, code)


def _decode(argument: str, rule: str, **changes: Any) -> Case:
    return _attention(argument, rule, TILING, **{**_DECODE, **changes})


def _sizes(query: int, value: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "query": t(7, heads, query),
        "key": [t(6, 128, kv_heads * query)],
        "value": [t(6, 128, kv_heads * value)],
        "query_heads": heads,
        "key_heads": kv_heads,
        "out": t(7, heads, value),
        **more,
    }


MLA_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def _blocks_of(tokens: int) -> dict[str, Any]:
    """Compressed rows in blocks of so many tokens; a table of 16 for each of two requests."""
    return {
        "key": [t(16, tokens, 512)],
        "value": [t(16, tokens, 512)],
        "key_rope": t(16, tokens, 64),
        "block_table": i32(2, 16),
        "block_size": tokens,
    }


def _compressed(heads: int) -> dict[str, Any]:
    return {
        **_DECODE,
        "query": t(2, heads, 512),
        "query_rope": t(2, heads, 64),
        "query_heads": heads,
        "out": t(heads, 2, 512),
    }


_EQUAL = "equal head sizes of 64 or 128"

ATTENTION = [
    _attention("key", "be float16 or bfloat16 as query", key=[f16(6, 128, 256)]),
    _attention("key_heads", "divide queryHeads", **_sizes(128, 128, 8, 3)),
    _attention("key_heads", "at most 64 query heads", **_sizes(128, 128, 65, 1)),
    _attention("key_heads", "at most 64 query heads", **_sizes(128, 128, 128, 1)),
    _attention("query", "at most 512 entries, a multiple of 16", **_sizes(72, 72, 8, 2)),
    _attention("query", "at most 512 entries, a multiple of 16", **_sizes(528, 528, 8, 2)),
    _attention("mask", "be given when sparse_mode is 2, 3 or 4", mask=None),
    _attention("mask", "end in [2048, 2048]", mask=Operand((128, 128), "int8")),
    _attention("mask", "be null", TILING, sparse_mode=0),
    _attention("sparse_mode", "be 0, 3 or 4", TILING, sparse_mode=2),
    _attention("sparse_mode", "be 0, 3 or 4", TILING, sparse_mode=1),
    _attention(
        "pre_tokens", "not be below -nextTokens", sparse_mode=4, pre_tokens=-9, next_tokens=5
    ),
    _attention("query_lengths", "be given", query_lengths=None),
    _attention("key_lengths", "be given", key_lengths=None),
    _attention("query_lengths", "end with the tokens of query", query_lengths=ints(3, 6)),
    _attention("query_lengths", "end with the tokens of query", query_lengths=ints(8, 7)),
    _attention("key_lengths", "an entry for each request", key_lengths=ints(130, 4, 9)),
    _attention(
        "key_lengths", "end with the tokens of key", **{**_PREFILL, "key_lengths": ints(3, 6)}
    ),
    _attention("query_lengths", "no request more queries than keys", key_lengths=ints(130, 3)),
    _attention(
        "query_lengths",
        "at most 4096 entries",
        TILING,
        query=t(4097, 8, 128),
        out=t(4097, 8, 128),
        query_lengths=ints(*range(1, 4098)),
        key_lengths=ints(*[1] * 4097),
        block_table=i32(4097, 1),
    ),
    _attention("block_table", "a row for each request", block_table=i32(3, 2)),
    _attention("block_table", "a column for each block", key_lengths=ints(300, 4)),
    _attention(
        "block_size", "be a multiple of 16, at most 512", block_size=1024, key=[t(6, 1024, 256)]
    ),
    _attention(
        "block_size", "be a multiple of 16, at most 512", block_size=24, block_table=i32(2, 8)
    ),
    Case(
        "FusedInferAttentionScoreV3",
        "block_size",
        "be a multiple of 16, at most 1024",
        {"block_size": 1040, "key": [t(6, 1040, 256)], "value": [t(6, 1040, 256)]},
        cann="9.0",
    ),
    _attention("key", "have blocks of blockSize tokens", block_size=64, block_table=i32(2, 3)),
    _attention(
        "key",
        "rows of at most 65535 entries",
        **_sizes(512, 512, 256, 256, mask=None, sparse_mode=0),
    ),
    _attention("inner_precise", "be 0 with fewer key heads", TILING, inner_precise=1),
    _attention("out", "dtype of query", out=f16(7, 8, 128)),
    _attention("lse", "be float32", wants_lse=True, lse=f16(7, 8, 1)),
    _attention("lse", "be given when wants_lse is 1", wants_lse=True, lse=None),
    _attention("lse", "be [tokens, heads, 1]", wants_lse=True, lse=f32(7, 8)),
    # Sizes of heads.
    _attention("query", _EQUAL, TILING, **_sizes(80, 80, 8, 8)),
    _attention("query", _EQUAL, TILING, **_sizes(80, 80, 8, 2)),
    _attention("query", _EQUAL, TILING, **_sizes(96, 96, 8, 2)),
    _attention("query", _EQUAL, TILING, **_sizes(256, 256, 8, 2)),
    _attention("query", _EQUAL, TILING, **_sizes(192, 192, 8, 2)),
    _attention("query", _EQUAL, TILING, **_sizes(320, 256, 8, 8)),
    Case(
        "FusedInferAttentionScoreV3",
        "query",
        "equal ones up to 256 with fewer key heads",
        _sizes(256, 256, 8, 8),
        TILING,
        cann="9.0",
    ),
    Case("FusedInferAttentionScoreV2", "query", _EQUAL, _sizes(80, 80, 8, 2), TILING),
    # Sinks.
    Case("FusedInferAttentionScoreV4", "sink", "an entry for each head", {"sink": t(4)}, TILING),
    Case(
        "FusedInferAttentionScoreV4",
        "value",
        "heads of 64 or 128 entries beside learnableSink",
        _sizes(80, 80, 8, 2),
        TILING,
        cann="9.0",
    ),
    Case(
        "FusedInferAttentionScoreV4",
        "inner_precise",
        "be 0 when",
        {**_sizes(128, 128, 8, 8), "inner_precise": 1},
        TILING,
    ),
    # CANN 8.3.
    Case("FusedInferAttentionScoreV3", "block_table", "be null", {}, TILING, cann="8.3"),
    Case(
        "FusedInferAttentionScoreV3",
        "query",
        "be bfloat16",
        {
            **_PREFILL,
            "query": f16(7, 8, 128),
            "key": [f16(7, 2, 128)],
            "value": [f16(7, 2, 128)],
            "out": f16(7, 8, 128),
        },
        TILING,
        cann="8.3",
    ),
    Case("FusedInferAttentionScoreV3", "query_heads", "32, 64 or 128", _DECODE, TILING, cann="8.3"),
    Case(
        "FusedInferAttentionScoreV3",
        "wants_lse",
        "be 0",
        {**_compressed(32), "wants_lse": True, "lse": f32(2, 32, 1)},
        TILING,
        cann="8.3",
    ),
    # MLA.
    _attention("key_rope", "be given when query_rope", **{**_DECODE, "key_rope": None}),
    _attention("query_rope", "be given when key_rope", **{**_DECODE, "query_rope": None}),
    _attention("query_rope", "dtype of query", **{**_DECODE, "query_rope": f16(2, 16, 64)}),
    _attention("key_rope", "dtype of key", **{**_DECODE, "key_rope": f16(6, 128, 64)}),
    _decode("query_rope", "have size 64", query_rope=t(2, 16, 32)),
    _attention(
        "query_rope", "the tokens and heads of query", **{**_DECODE, "query_rope": t(2, 8, 64)}
    ),
    _decode(
        "query", "equal head sizes of 128, or of 512", query=t(2, 16, 256), key=[t(6, 128, 256)]
    ),
    _decode("query_rope", "be given when the heads", query_rope=None, key_rope=None),
    _decode(
        "block_table",
        "be given when the heads",
        block_table=None,
        key=[t(9, 1, 512)],
        value=[t(9, 1, 512)],
        key_rope=t(9, 1, 64),
        key_lengths=ints(4, 9),
    ),
    _decode("key_heads", "be 1", key_heads=2, key=[t(6, 128, 1024)], value=[t(6, 128, 1024)]),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(20)),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(129)),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(256)),
    _decode(
        "query_lengths",
        "no request more than 16 queries",
        query=t(18, 16, 512),
        query_rope=t(18, 16, 64),
        query_lengths=ints(17, 18),
        mask=MASK,
        sparse_mode=3,
        out=t(16, 18, 512),
    ),
    _decode(
        "query_lengths",
        "a single query under sparseMode 0",
        query=t(3, 16, 512),
        query_rope=t(3, 16, 64),
        query_lengths=ints(2, 3),
        out=t(16, 3, 512),
    ),
    Case("FusedInferAttentionScoreV3", "", "has no such operator", {}, TILING, soc=A310P),
]


def _scatter(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("ScatterPaKvCache", argument, rule, changes, code)


def _gather(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("GatherPaKvCache", argument, rule, changes, code)


def _norm_rope(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("KvRmsNormRopeCache", argument, rule, changes, code)


def _rotary(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("RopeWithSinCosCache", argument, rule, changes, code)


CACHES = [
    _scatter("value", "tokens and heads of key", value=t(6, 2, 128)),
    _scatter("key_cache", "hold the heads of key", key_cache=t(3, 128, 4, 128)),
    _scatter("key_cache", "a slot for each token", key_cache=t(1, 4, 2, 128)),
    _scatter(
        "key_cache",
        "end in pieces of 32 bytes",
        cache_mode="PA_NZ",
        key_cache=t(3, 8, 128, 32),
        value_cache=t(3, 16, 128, 16),
    ),
    _scatter(
        "value_cache",
        "end in pieces of 32 bytes",
        cache_mode="PA_NZ",
        key_cache=t(3, 16, 128, 16),
        value_cache=t(3, 8, 128, 32),
    ),
    _scatter("slot_mapping", "size of key's dimension 0", slot_mapping=i64(6)),
    Case("ScatterPaKvCache", "", "has no such operator", {}, TILING, soc=A310P),
    _gather(
        "key", "rows of at most 148 KiB", TILING, key=t(9, 128, 640), key_cache=t(3, 128, 128, 640)
    ),
    _norm_rope("cos", "size of kv's dimension 0", cos=t(6, 1, 1, 64), sin=t(6, 1, 1, 64)),
    _norm_rope("index", "an entry for each token", index=i64(6)),
    _norm_rope("rope_cache", "dtype of kv, or int8", rope_cache=f16(3, 128, 1, 64)),
    _norm_rope("latent_cache", "dtype of kv, or int8", latent_cache=f16(3, 128, 1, 512)),
    _norm_rope("rope_cache", "have size 64", TILING, rope_cache=t(3, 128, 1, 32)),
    _norm_rope("latent_cache", "have size 512", TILING, latent_cache=t(3, 128, 1, 256)),
    _rotary(
        "head_size", "be a multiple of 32", TILING, head_size=80, query=t(7, 640), key=t(7, 160)
    ),
    _rotary(
        "head_size", "be a multiple of 32", TILING, head_size=112, query=t(7, 896), key=t(7, 224)
    ),
    _rotary("table", "rows of a multiple of 32 entries", TILING, table=t(64, 48)),
    _rotary("table", "rows of a multiple of 32 entries", TILING, table=t(64, 160)),
    _rotary("positions", "an entry for each token", positions=i64(6)),
    _rotary("section", "be [0, 0, 0] or [16, 24, 24]", TILING, section=ints(8, 12, 12)),
    Case("AttentionUpdate", "parts", "be 1 to 16 parts", {"parts": [t(14, 128)]}),
    *(
        Case(operator, argument, "dimension", {argument: tensor})
        for operator, tensors in (
            (
                "LightningIndexer",
                {"query": t(7, 1, 8, 128), "key": t(384, 1, 128), "weights": f32(7, 1, 8)},
            ),
            (
                "SparseFlashAttention",
                {
                    "query": t(7, 1, 8, 512),
                    "key": t(384, 1, 512),
                    "sparse_indices": i32(7, 1, 1, 64),
                },
            ),
        )
        for argument, tensor in tensors.items()
    ),
    Case("LightningIndexer", "sparse_count", "be 1 to 2048, or 3072", {"sparse_count": 2049}),
    Case("LightningIndexer", "weights", "be float32 or have the dtype", {"weights": f16(7, 8)}),
    *(
        Case("LightningIndexer", argument, "", {argument: None})
        for argument in ("query_lengths", "key_lengths", "block_table")
    ),
    Case(
        "SparseFlashAttention",
        "sparse_block_size",
        "divide the block size",
        {"sparse_block_size": 48},
    ),
]

NORMS = [
    Case(
        "RmsNorm",
        "x",
        "a last dimension of at least 32 bytes",
        {"x": f16(7, 8), "gamma": f16(8), "y": f16(7, 8)},
        TILING,
        soc=A310P,
    ),
    Case("RmsNorm", "gamma", "trailing sizes of x", {"gamma": t(128)}),
    Case("AddRmsNorm", "gamma", "trailing sizes of x1", {"gamma": t(128)}),
    Case("AddRmsNormDynamicQuantV2", "gamma", "trailing sizes of x1", {"gamma": t(128)}),
    Case("SwiGlu", "x", "an even size in dimension dim", {"x": t(7, 255)}),
]


def _transposed(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("TransposeBatchMatMul", argument, rule, changes, code)


def _quantized(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("QuantMatmulV5", argument, rule, changes, code)


def _grouped(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("GroupedMatmulV5", argument, rule, changes, code)


# 8-bit rows beside 4-bit weights with groups along the depth, and scales of blocks of both.
_MIXED = {
    "x1": i8(5, 512),
    "x2": i32(512, 12),
    "x1_scale": f32(5, 1),
    "x2_scale": i64(2, 96),
    "y_offset": f32(96),
    "group_size": 256,
}
_BLOCKS = {
    "x1": i8(5, 512),
    "x2": i8(256, 512),
    "x1_scale": f32(5, 4),
    "x2_scale": f32(2, 4),
    "transpose2": True,
    "group_size": (1 << 32) + (128 << 16) + 128,
    "out": t(5, 256),
}
# 8-bit rows beside 4-bit weights by experts.
_HALVED = {
    "weight": [i32(4, 64, 16)],
    "bias": [f32(4, 128)],
    "scale": [i64(4, 1, 128)],
    "out": [t(6, 128)],
}
_STATIC = {"row_scale": None}
# Weights of integers beside rows of floats.
_WIDENED = {
    "x": [t(6, 64)],
    "scale": None,
    "row_scale": None,
    "weight_scale": [t(4, 96)],
    "weight_offset": [t(4, 96)],
}


def _widened(argument: str, rule: str, **changes: Any) -> Case:
    return _grouped(argument, rule, **{**_WIDENED, **changes})


def _halved(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return _grouped(argument, rule, code, **{**_HALVED, **changes})


def _weight_only(argument: str, rule: str, **changes: Any) -> Case:
    return Case("WeightQuantBatchMatmulV2", argument, rule, changes)


PRODUCTS = [
    Case("Mm", "mat2", "inner size of self", {"mat2": t(32, 96)}),
    Case("Addmm", "mat2", "inner size of mat1", {"mat2": t(32, 96)}),
    Case("BatchMatMul", "mat2", "inner size of self", {"mat2": t(2, 32, 96)}),
    _transposed("x2", "dtype of x1", x2=f16(16, 128, 512)),
    _transposed("permute_x1", "be 0 1 2 or 1 0 2", permute_x1=ints(2, 0, 1)),
    _transposed("permute_x2", "be 0 1 2", permute_x2=ints(0, 2, 1)),
    _transposed("permute_y", "be 1 0 2", permute_y=ints(0, 1, 2)),
    _transposed("x1", "fewer than 65536 entries", TILING, x1=t(7, 128, 512), x2=t(128, 512, 128)),
    _transposed("scale", "be int64 or uint64", scale=f32(512)),
    _transposed("out", "dtype of x1", out=f16(7, 16, 512)),
    _quantized("x2_scale", "float32 or bfloat16 when out is bfloat16", x2_scale=i64(96)),
    _quantized(
        "x2_scale",
        "int64 or uint64 when out is float16 and x1_scale is null",
        x1_scale=None,
        out=f16(5, 96),
    ),
    _quantized(
        "x2_scale",
        "float32 when out is float16 and x1_scale is given",
        x2_scale=t(96),
        out=f16(5, 96),
    ),
    _quantized("x2_scale", "int64 or uint64 when out is int8", out=i8(5, 96), x1_scale=None),
    _quantized("x1_scale", "an entry for each row", x1_scale=f32(4)),
    _quantized("x1_scale", "be null when out is int32", out=i32(5, 96)),
    _quantized("bias", "when out is bfloat16", bias=f16(96)),
    _quantized("bias", "int32, float32 or float16 when out is float16", bias=t(96), out=f16(5, 96)),
    _quantized("bias", "int32 when out is int32", bias=f32(96), out=i32(5, 96), x1_scale=None),
    _quantized(
        "bias",
        "int32 when out is float16 and x1_scale is null",
        bias=f16(96),
        out=f16(5, 96),
        x1_scale=None,
        x2_scale=i64(96),
    ),
    *(
        _quantized(argument, f"{rule} when x1 is int8 and x2 int4", **{**_MIXED, **changes})
        for argument, rule, changes in (
            ("x1_scale", "be given", {"x1_scale": None}),
            ("x2_scale", "be int64 or uint64", {"x2_scale": f32(2, 96)}),
            ("y_offset", "be given", {"y_offset": None}),
            ("y_offset", "be float32", {"y_offset": t(96)}),
            ("y_offset", "last dimension", {"y_offset": f32(64)}),
            ("bias", "be null", {"bias": i32(96)}),
            ("transpose1", "be false", {"transpose1": True}),
            (
                "x1",
                "a multiple of 256 in its last dimension",
                {"x1": i8(5, 320), "x2": i32(320, 12)},
            ),
        )
    ),
    *(
        _quantized(argument, f"{rule} when x1_scale has columns", **{**_BLOCKS, **changes})
        for argument, rule, changes in (
            ("x1_scale", "each 128 columns of x1", {"x1_scale": f32(5, 5)}),
            ("x2_scale", "be float32", {"x2_scale": t(2, 4)}),
            ("x2_scale", "each 128 rows by 128 columns of x2", {"x2_scale": f32(4, 2)}),
            ("x1", "be int8", {"x1": i32(5, 512)}),
            (
                "x1",
                "a multiple of 512 in its last dimension",
                {"x1": i8(5, 640), "x1_scale": f32(5, 5)},
            ),
            (
                "x2",
                "a multiple of 256 in its dimension -2",
                {"x2": i8(384, 512), "x2_scale": f32(3, 4)},
            ),
            ("transpose1", "be false", {"transpose1": True}),
            ("transpose2", "be true", {"transpose2": False}),
            ("group_size", "be 4303356032", {"group_size": 0}),
            ("bias", "be float32", {"bias": i32(256)}),
            ("out", "be bfloat16", {"out": f16(5, 256)}),
        )
    ),
    Case("QuantMatmulWeightNz", "x2", "lie in FRACTAL_NZ", {"x2": i8(64, 96)}),
    Case(
        "QuantMatmulWeightNz",
        "x2",
        "more than one row and column",
        {
            "x2": Operand((64, 1), "int8", is_tiled=True),
            "x2_scale": f32(1),
            "out": t(5, 1),
        },
        TILING,
    ),
    _weight_only("weight", "be contiguous, or the transpose", weight=i8(64, 96)(apart=True)),
    _weight_only("weight", "size of x's dimension 1", weight=i8(32, 96)),
    _weight_only("scale", "dtype of x, or be int64", scale=f16(96)),
    _weight_only("scale", "a row for each group", scale=t(2, 96)),
    _weight_only("scale", "a row for each group", scale=t(1, 96), group_size=word(32)),
    _weight_only("x", "be float16 when scale", scale=i64(96), offset=None),
    _weight_only(
        "weight",
        "be int8 when scale",
        x=f16(7, 64),
        weight=i32(64, 12),
        scale=i64(96),
        offset=None,
        bias=None,
        out=f16(7, 96),
    ),
    _weight_only("offset", "dtype of x, or be int32", offset=f16(96)),
    _weight_only("scale", "int64 or uint64 when offset", offset=i32(96)),
    _weight_only("out_scale", "be uint64", out_scale=i64(96), out=i8(7, 96)),
    _weight_only("out_scale", "be given when out is int8", out=i8(7, 96)),
    _weight_only("bias", "be float32 when x is bfloat16", bias=f16(96)),
    _weight_only(
        "bias",
        "be float16 when x is float16",
        x=f16(7, 64),
        scale=f16(96),
        offset=None,
        out=f16(7, 96),
    ),
    _weight_only(
        "group_size",
        "be 0, or a multiple of 32",
        group_size=word(16),
        scale=t(4, 96),
        offset=t(4, 96),
    ),
    _weight_only(
        "out",
        "1 to 65535",
        weight=i8(64, 65536),
        scale=t(65536),
        offset=None,
        bias=None,
        out=t(7, 65536),
    ),
    _weight_only("out", "be int8 when out_scale is given", out_scale=Operand((96,), "uint64")),
    _weight_only("out", "dtype of x when out_scale", out=f16(7, 96)),
    _weight_only(
        "out",
        "when weight lies in FRACTAL_NZ",
        weight=Operand((64, 96), "int8", is_tiled=True),
        out_scale=Operand((96,), "uint64"),
        out=i8(7, 96),
    ),
    _grouped("weight", "dtype of x, or be int8", x=[t(6, 64)], weight=[f16(4, 64, 96)]),
    _grouped("x", "at most 128 tensors", x=[i8(1, 64)] * 129),
    _grouped("weight", "at most 1024 groups", weight=[i8(1025, 64, 96)], group_list=i64(1025)),
    _grouped("group_list", "an entry for each group", group_list=i64(3)),
    _grouped("scale", "be bfloat16 when", scale=[f32(4, 96)], **_STATIC),
    _grouped("scale", "be float32 when", scale=[i64(4, 96)], out=[f16(6, 96)], **_STATIC),
    _grouped("scale", "int64 or uint64 when", scale=[t(4, 96)], out=[i8(6, 96)], **_STATIC),
    _grouped("scale", "be bfloat16 when", scale=[f32(4, 96)]),
    _grouped("scale", "be float32 when", out=[f16(6, 96)]),
    _grouped("bias", "be float16 when", x=[f16(6, 64)], weight=[f16(4, 64, 96)], bias=[f32(4, 96)]),
    _grouped("bias", "be float32 when", x=[t(6, 64)], weight=[t(4, 64, 96)], bias=[t(4, 96)]),
    _grouped("bias", "int32 or bfloat16 when", bias=[f32(4, 96)]),
    _grouped(
        "activation",
        "be 0 when out is int32",
        activation=2,
        out=[i32(6, 96)],
        scale=None,
        **_STATIC,
    ),
    _widened("weight_scale", "be given when", weight_scale=None),
    _widened("weight_offset", "be given when", weight_offset=None),
    _widened("weight_scale", "dtype of x when", weight_scale=[f32(4, 96)]),
    _widened("weight_offset", "dtype of x when", weight_offset=[f32(4, 96)]),
    _widened("weight_offset", "sizes of weight_scale", weight_offset=[t(4, 1, 96)]),
    _widened(
        "weight_scale",
        "size of out's last dimension",
        weight_scale=[t(4, 32)],
        weight_offset=[t(4, 32)],
    ),
    _widened(
        "weight_scale",
        "a row for each matrix of weight",
        weight_scale=[t(4, 2, 96)],
        weight_offset=[t(4, 2, 96)],
    ),
    _widened(
        "weight_scale",
        "a row for each matrix of weight",
        weight_scale=[t(3, 96)],
        weight_offset=[t(3, 96)],
    ),
    _widened(
        "weight_scale",
        "a number of groups that divides",
        weight=[i32(4, 64, 12)],
        weight_scale=[t(4, 3, 96)],
        weight_offset=[t(4, 3, 96)],
    ),
    _widened("scale", "be null when", scale=[t(4, 96)]),
    _widened("row_scale", "be null when", row_scale=[f32(6)]),
    _widened("group_type", "be -1 or 0 when", group_type=2),
    _widened("activation", "be 0 when x is", activation=2),
    _widened("out", "dtype of x when", out=[f16(6, 96)]),
    _grouped("weight_scale", "be null when", weight_scale=[t(4, 96)]),
    _grouped("weight_offset", "be null when", weight_offset=[t(4, 96)]),
    _grouped("row_scale", "have 1 dimension", row_scale=[f32(6, 1)]),
    _halved("bias", "be given when", bias=None),
    _halved("bias", "be float32 when", bias=[t(4, 128)]),
    _halved("bias", "have 2 dimensions when", bias=[f32(4, 1, 128)]),
    _halved("bias", "size of out's last dimension", bias=[f32(4, 64)]),
    _halved("scale", "be given when", scale=None),
    _halved("scale", "int64 or uint64 when", scale=[f32(4, 1, 128)]),
    _halved("scale", "have 3 dimensions when", scale=[i64(4, 128)]),
    _halved("scale", "size of out's last dimension", scale=[i64(4, 1, 64)]),
    _halved("scale", "a number of groups that divides", TILING, scale=[i64(4, 3, 128)]),
    _halved("row_scale", "be given when", row_scale=None),
    _halved("row_scale", "1 to 2 dimensions", row_scale=[f32(6, 1, 1)]),
    _halved("x", "64 to 18432", TILING, x=[i8(6, 96)], weight=[i32(4, 96, 16)]),
    _halved("weight_scale", "be null when", weight_scale=[t(4, 128)]),
    _halved("weight_offset", "be null when", weight_offset=[t(4, 128)]),
    _halved("group_type", "be 0 when", group_type=-1),
    _halved("group_list_form", "be 1 when", group_list_form=0),
    _halved("activation", "be 0 when x is int8 and weight int4", activation=2),
    _halved("out", "be float16 or bfloat16 when", out=[i32(6, 128)]),
    Case(
        "GroupedMatmulWeightNz",
        "weight",
        "whole tiles",
        {"weight": [Operand((4, 64, 80), "int8", is_tiled=True)]},
    ),
    Case(
        "GroupedMatmulWeightNz",
        "weight",
        "whole tiles",
        {"weight": [Operand((4, 40, 96), "int8", is_tiled=True)], "x": [i8(6, 40)]},
    ),
    Case("GroupedMatmulWeightNz", "group_type", "be -1 or 0", {"group_type": 2}),
]


def _swiglu(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("DequantSwigluQuant", argument, rule, changes, code)


def _wide(columns: int) -> dict[str, Any]:
    return {
        "x": i32(7, columns),
        "weight_scale": f32(4, columns),
        "y": i8(7, columns // 2),
    }


QUANTIZATION = [
    Case("DynamicQuant", "scale", "an entry for each row", {"scale": f32(6)}),
    Case("DynamicQuant", "smooth", "dtype of x", {"smooth": f32(64)}),
    Case("DynamicQuant", "y", "sizes of x", {"y": i8(6, 64)}),
    Case(
        "Quantize", "scales", "one entry, or one for each", {"scales": f32(32), "zero_points": None}
    ),
    Case("Quantize", "scales", "be bfloat16 when zero_points", {"zero_points": t(64)}),
    Case(
        "Quantize",
        "x",
        "be bfloat16 when scales",
        {"x": f16(7, 64), "scales": t(64), "zero_points": None},
    ),
    Case("DequantBias", "weight_scale", "be bfloat16 when out", {"weight_scale": f32(64)}),
    Case("DequantBias", "weight_scale", "be float32 when out", {"out": f16(7, 64)}),
    Case("DequantBias", "bias", "float32, float16, bfloat16 or int32", {"bias": i64(64)}),
    _swiglu("x", "a multiple of 64 in", TILING, **_wide(2 * 80)),
    _swiglu("x", "2 to 7232", TILING, **_wide(2 * 14336)),
    Case("DequantSwigluQuant", "x", "2 to 10496", _wide(2 * 14336), TILING, cann="9.0"),
    _swiglu("weight_scale", "be given when x is int32", weight_scale=None),
    _swiglu("weight_scale", "a row for each group", weight_scale=f32(3, 256)),
    _swiglu("activation_scale", "an entry for each row", activation_scale=f32(6)),
    _swiglu("group_index", "have 1 dimensions", group_index=i64(4, 1)),
    _swiglu("bias", "int32, float32, float16 or bfloat16", bias=i8(4, 256)),
    _swiglu("bias", "size of x's last dimension", bias=f32(4, 128)),
    _swiglu("bias", "a row for each group", bias=f32(3, 256)),
    _swiglu("quant_offset", "be null", quant_offset=f32(128)),
]


def _init(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("MoeInitRoutingV3", argument, rule, changes, code)


def _gate(argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case("MoeGatingTopK", argument, rule, changes, code)


EXPERTS = [
    _init("active_rows", "the number of assignments", TILING, active_rows=7),
    Case("MoeInitRoutingV3", "count_form", "be 1 or 2", {"count_form": 0}, TILING, cann="8.3"),
    Case("MoeInitRoutingV3", "drop_pad_mode", "be 0", {"drop_pad_mode": 1}, TILING, cann="8.3"),
    Case("MoeInitRoutingV3", "quant_mode", "be -1 or 1", {"quant_mode": 0}, TILING, cann="8.3"),
    _init("active_range", "be two numbers", active_range=ints(0, 9)),
    _init("active_range", "be two numbers", active_range=ints(4, 4)),
    _init("active_range", "end at 10240", TILING, active_range=ints(0, 10241), experts=10241),
    _init("scale", "be float32", scale=t(8, 64), quant_mode=1),
    _init("scale", "be [experts of the range, H]", scale=f32(4, 64), quant_mode=1),
    _gate("groups", "divide the experts", groups=7),
    _gate("groups", "more experts to each group than", TILING, groups=64, k=1),
    _gate(
        "groups",
        "at most 2048 experts when",
        TILING,
        x=f32(7, 528),
        bias=f32(528),
        scores=f32(7, 528),
        groups=66,
    ),
    _gate("chosen_groups", "be 1 to groupCount", chosen_groups=9),
    _gate("k", "be 1 to the experts", k=17),
    Case("MoeGatingTopKSoftmaxV2", "finished", "be bool", {"finished": i32(7)}),
    Case("MoeGatingTopKSoftmaxV2", "k", "be 1 to 1024", {"k": 65}),
    Case("MoeGatingTopKSoftmaxV2", "k", "be 1 to 1024", {"k": 0}),
    Case(
        "MoeGatingTopKSoftmaxV2",
        "softmax_out",
        "be float32",
        {"wants_softmax": True, "softmax_out": t(7, 64)},
    ),
    Case("MoeFinalizeRoutingV2", "rows", "have 2 dimensions", {"rows": t(1, 14, 64)}),
    Case("MoeFinalizeRoutingV2", "rows", "have 3 dimensions", {"drop_pad_mode": 3}),
    Case("MoeFinalizeRoutingV2", "scales", "dtype of rows, or be float32", {"scales": f16(7, 2)}),
    Case("MoeFinalizeRoutingV2", "scales", "an entry for each", {"scales": t(7, 3)}),
    Case("MoeFinalizeRoutingV2", "skip1", "dtype of rows", {"skip1": f32(7, 64)}),
    Case(
        "MoeFinalizeRoutingV2",
        "skip2",
        "dtype of rows",
        {"skip1": t(7, 64), "skip2": f32(7, 64)},
    ),
    Case(
        "MoeFinalizeRoutingV2",
        "expert_index",
        "be int32",
        {"bias": t(8, 64), "expert_index": i64(7, 2)},
    ),
    Case("MoeFinalizeRoutingV2", "skip2", "be null when skip1", {"skip2": t(7, 64)}),
    Case(
        "MoeFinalizeRoutingV2",
        "bias",
        "dtype of rows",
        {"bias": f32(8, 64), "expert_index": i32(7, 2)},
    ),
    Case("MoeFinalizeRoutingV2", "expert_index", "be given when bias", {"bias": t(8, 64)}),
]


def _list(dtype: str = "float16") -> list[Operand]:
    return [Operand((3,), dtype), Operand((2, 4), dtype)]


LEGAL |= {"ForeachCopy": {"x": _list(), "out": _list()}}
LISTS = [
    Case("ForeachCopy", "x", "be float32", {"x": _list("complex64")}),
    Case("ForeachCopy", "", "Ascend310P3 has no such operator", {}, TILING, A310P),
    Case("ForeachCopy", "out", "as many entries as x", {"out": [f16(3)]}),
    Case("ForeachCopy", "out", "sizes of x, each", {"out": [f16(3), f16(4, 2)]}),
]


_TWO = {"self": t(7, 64), "other": t(7, 64), "alpha": aclnn.Number(1.0), "out": t(7, 64)}
_NUMBER = {**_TWO, "other": aclnn.Number(2.0)}
_FUNCTION = {"self": t(7, 64), "out": t(7, 64)}


def of_bools(*sizes: int) -> Operand:
    return Operand(sizes, "bool")


_COMPARED = {"self": t(7, 64), "other": t(7, 64), "out": of_bools(7, 64)}
_BITS = {"self": i64(7, 64), "other": i64(7, 64), "out": i64(7, 64)}
_SCATTERED = {"self": t(7, 64), "dim": 0, "index": i64(5, 64)}

LEGAL |= {
    "Add": _TWO,
    "InplaceAdd": {name: _TWO[name] for name in ("self", "other", "alpha")},
    "Adds": _NUMBER,
    "Abs": _FUNCTION,
    "Exp2": _FUNCTION,
    "Round": _FUNCTION,
    "DivMods": {"self": t(7, 64), "other": aclnn.Number(2.0), "mode": 2, "out": t(7, 64)},
    "FloorDivides": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": t(7, 64)},
    "Addcmul": {
        **dict.fromkeys(("self", "tensor1", "tensor2"), t(7, 64)),
        "value": aclnn.Number(1.0),
        "out": t(7, 64),
    },
    "ClampMax": {"self": t(7, 64), "clip_max": aclnn.Number(0.0), "out": t(7, 64)},
    "Flip": {"self": t(7, 64), "dims": ints(0), "out": t(7, 64)},
    "NonzeroV2": {"self": t(7, 64), "out": i64(2, 448)},
    "RepeatInterleave": {
        "self": t(7),
        "repeats": i64(7),
        "output_size": 7,
        "out": t(7),
    },
    "AvgPool2d": {
        "self": t(2, 3, 8, 8),
        "kernel_size": ints(2, 2),
        "strides": ints(2, 2),
        "paddings": ints(0, 0),
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": 0,
        "cube": byte(0),
        "out": t(2, 3, 4, 4),
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
        "self": t(7, 64),
        "beta": aclnn.Number(1.0),
        "threshold": aclnn.Number(20.0),
        "out": t(7, 64),
    },
    "PowTensorScalar": {"self": t(7, 64), "exponent": aclnn.Number(2.0), "out": t(7, 64)},
    "PowScalarTensor": {"self": aclnn.Number(2.0), "exponent": t(7, 64), "out": t(7, 64)},
    "RemainderTensorScalar": {"self": t(7, 64), "other": aclnn.Number(2.0), "out": t(7, 64)},
    "InplaceAddcmul": {
        **dict.fromkeys(("self", "tensor1", "tensor2"), t(7, 64)),
        "value": aclnn.Number(1.0),
    },
    "ClampMin": {"self": t(7, 64), "clip_min": aclnn.Number(0.0), "out": t(7, 64)},
    "InplaceCopy": {"self": t(7, 64), "src": t(7, 64)},
    "Stack": {"tensors": [t(7, 64), t(7, 64)], "dim": 0, "out": t(2, 7, 64)},
    "RepeatInterleaveInt": {
        "self": t(7, 64),
        "repeats": 2,
        "output_size": 896,
        "out": t(896),
    },
    "RepeatInterleaveIntWithDim": {
        "self": t(7, 64),
        "repeats": 2,
        "dim": 0,
        "output_size": 14,
        "out": t(14, 64),
    },
    "ConstantPadNd": {
        "self": t(7, 64),
        "pad": ints(0, 0, 0, 1),
        "value": aclnn.Number(0.0),
        "out": t(8, 64),
    },
    "Linspace": {
        "start": aclnn.Number(0.0),
        "end": aclnn.Number(6.0),
        "steps": 7,
        "out": f32(7),
    },
    "Eye": {"rows": 7, "columns": 64, "out": t(7, 64)},
    "IndexPutImpl": {
        "self": t(7, 64),
        "indices": [i64(5)],
        "values": t(5, 64),
        "accumulate": False,
        "unsafe": False,
    },
    "InplaceIndexCopy": {"self": t(7, 64), "dim": 0, "index": i64(5), "source": t(5, 64)},
    "InplaceIndexFill": {
        "self": t(7, 64),
        "dim": 0,
        "index": i64(5),
        "value": aclnn.Number(0.0),
    },
    "Scatter": {**_SCATTERED, "src": t(5, 64), "reduce": 0, "out": t(7, 64)},
    "ScatterAdd": {**_SCATTERED, "src": t(5, 64), "out": t(7, 64)},
    "ScatterValue": {**_SCATTERED, "value": aclnn.Number(0.0), "reduce": 0, "out": t(7, 64)},
    "ScatterNdUpdate": {"self": t(7, 64), "indices": i64(5, 1), "updates": t(5, 64)},
    "Amax": {"self": t(7, 64), "dims": ints(1), "keep_dim": False, "out": t(7)},
    "Mean": {
        "self": t(7, 64),
        "dims": ints(1),
        "keep_dims": False,
        "dtype": word(27),
        "out": t(7),
    },
    "LinalgVectorNorm": {
        "self": t(7, 64),
        "ord": aclnn.Number(2.0),
        "dims": ints(1),
        "keep_dims": False,
        "dtype": word(27),
        "out": t(7),
    },
    "Cumprod": {
        "input": t(7, 64),
        "dim": aclnn.Number(1, torch.int64),
        "dtype": word(27),
        "out": t(7, 64),
    },
    "InplaceNormal": {
        "self": t(7, 64),
        "mean": ctypes.c_float(0.0),
        "std": ctypes.c_float(1.0),
        "seed": 1,
        "offset": 0,
    },
    "Clamp": {
        "self": t(7, 64),
        "least": aclnn.Number(0.0),
        "most": aclnn.Number(1.0),
        "out": t(7, 64),
    },
    "Any": {"self": of_bools(7, 64), "dims": ints(1), "keep_dims": False, "out": of_bools(7)},
    "All": {"self": of_bools(7, 64), "dims": ints(1), "keep_dims": False, "out": of_bools(7)},
    "Max": {"self": t(7, 64), "out": t()},
    "Min": {"self": t(7, 64), "out": t()},
    "Nonzero": {"self": t(7, 64), "out": i64(448, 2)},
    "InplaceMaskedFillScalar": {
        "self": t(7, 64),
        "mask": of_bools(7, 64),
        "value": aclnn.Number(2.0),
    },
    "SWhere": {
        "condition": of_bools(7, 64),
        "self": t(7, 64),
        "other": t(7, 64),
        "out": t(7, 64),
    },
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
        "start": aclnn.Number(0.0),
        "end": aclnn.Number(7.0),
        "step": aclnn.Number(1.0),
        "out": i64(7),
    },
    "Cast": {"self": t(7, 64), "dtype": word(0), "out": f32(7, 64)},
    "Cat": {"tensors": [t(7, 64), t(7, 64)], "dim": 0, "out": t(14, 64)},
    "Repeat": {"self": t(7, 64), "repeats": ints(2, 1), "out": t(14, 64)},
    "Triu": {"self": t(7, 64), "diagonal": 0, "out": t(7, 64)},
    # The first dimension is not indexed.
    "Index": {"self": t(7, 64), "indices": [f32(0), i64(5)], "out": t(7, 5)},
    "IndexAdd": {
        "self": t(7, 64),
        "dim": 0,
        "index": i64(5),
        "source": t(5, 64),
        "alpha": aclnn.Number(1.0),
        "out": t(7, 64),
    },
    "IndexSelect": {"self": t(7, 64), "dim": 0, "index": i64(5), "out": t(5, 64)},
    "Gather": {"self": t(7, 64), "dim": 0, "index": i64(5, 64), "out": t(5, 64)},
    "InplaceScatter": {
        "self": t(7, 64),
        "dim": 0,
        "index": i64(5, 64),
        "src": t(5, 64),
        "reduce": 0,
    },
    "Sort": {
        "self": t(7, 64),
        "stable": True,
        "dim": -1,
        "descending": False,
        "values": t(7, 64),
        "indices": i64(7, 64),
    },
    "Topk": {
        "self": t(7, 64),
        "k": 5,
        "dim": -1,
        "largest": True,
        "sorted": True,
        "values": t(7, 5),
        "indices": i64(7, 5),
    },
    "LogSumExp": {"self": t(7, 64), "dims": ints(1), "keep_dim": False, "out": t(7)},
    "ReduceSum": {
        "self": t(7, 64),
        "dims": ints(1),
        "keep_dims": False,
        "dtype": word(27),
        "out": t(7),
    },
    "Cumsum": {"self": t(7, 64), "dim": 1, "dtype": word(27), "out": t(7, 64)},
    "ArgMax": {"self": t(7, 64), "dim": -1, "keep_dim": False, "out": i64(7)},
    "Softmax": {"self": t(7, 64), "dim": -1, "out": t(7, 64)},
    "InplaceUniform": {
        "self": t(7, 64),
        "from": 0.0,
        "to": 1.0,
        "seed": 1,
        "offset": 0,
    },
    "LayerNorm": {
        "input": t(7, 64),
        "normalized_shape": ints(64),
        "weight": t(64),
        "bias": t(64),
        "epsilon": 1e-5,
        "out": t(7, 64),
        "mean_out": None,
        "rstd_out": None,
    },
    "FastLayerNorm": {
        "input": t(7, 64),
        "normalized_shape": ints(64),
        "weight": t(64),
        "bias": t(64),
        "epsilon": 1e-5,
        "out": t(7, 64),
        "mean_out": None,
        "rstd_out": None,
    },
    "Convolution": {
        "input": t(2, 3, 16, 16),
        "weight": t(8, 3, 4, 4),
        "bias": t(8),
        "stride": ints(4, 4),
        "padding": ints(0, 0),
        "dilation": ints(1, 1),
        "transposed": False,
        "output_padding": ints(0, 0),
        "groups": 1,
        "out": t(2, 8, 4, 4),
        "type": byte(0),
    },
}

ELEMENTS = [
    Case("IndexPutImpl", "indices", "int32, int64 or bool", {"indices": [i8(5)]}),
    Case("FastLayerNorm", "weight", "trailing sizes of input", {"weight": t(32)}),
    Case("FastLayerNorm", "bias", "trailing sizes of input", {"bias": t(32)}),
    Case("Index", "indices", "int32, int64 or bool", {"indices": [f32(0), i8(5)]}),
    Case("ArgMax", "dim", "be a dimension of self", {"dim": 2}),
    Case("LayerNorm", "weight", "trailing sizes of input", {"weight": t(32)}),
    Case("LayerNorm", "bias", "trailing sizes of input", {"bias": t(32)}),
    Case("Convolution", "stride", "a number for each dimension", {"stride": ints(4)}),
    Case("Convolution", "dilation", "a number for each dimension", {"dilation": ints(1, 1, 1)}),
]


def _of_sister(case: Case, operator: str) -> Case:
    """The same call of an operator that shares the rows of the case's."""
    return replace(case, operator=operator)


def _tiled(case: Case, operator: str) -> Case:
    """The same call of the operator that takes the case's weight in tiles."""

    def in_tiles(value: Any) -> Any:
        if isinstance(value, list):
            return [in_tiles(each) for each in value]
        return value(is_tiled=True) if isinstance(value, Operand) and value.sizes[1:] else value

    weights = {name: in_tiles(case.changes[name]) for name in case.changes if name in _WEIGHTS}
    return replace(case, operator=operator, changes={**case.changes, **weights})


_WEIGHTS = ("weight", "x2")
_OF_MLA = {"query_rope", "key_rope"}
# Operators that hold their arguments to the rows of another one.
SISTERS = [
    *(
        _of_sister(case, "FusedInferAttentionScoreV2")
        for case in ATTENTION
        if case.operator == "FusedInferAttentionScoreV3"
        and case.soc == A2
        and not _OF_MLA & {case.argument, *case.changes}
    ),
    *(
        _of_sister(case, "DynamicQuantV2")
        for case in QUANTIZATION
        if case.operator == "DynamicQuant"
    ),
    *(
        _tiled(case, "GroupedMatmulWeightNz")
        for case in PRODUCTS
        if case.operator == "GroupedMatmulV5" and case.rule != "1 to 65535"
    ),
    Case(  # of a matrix that fills its tiles
        "GroupedMatmulWeightNz",
        "weight",
        "1 to 65535",
        {"weight": [Operand((4, 16, 65536), "int8", is_tiled=True)]},
        TILING,
    ),
    *(
        _tiled(case, "QuantMatmulWeightNz")
        for case in PRODUCTS
        if case.operator == "QuantMatmulV5"
        and not (case.argument == "x2" and ("contiguous" in case.rule or "65535" in case.rule))
        and " when x1 is int8" not in case.rule
        and "when x1_scale has" not in case.rule
    ),
]


def _inserted(operator: str, after: str, **more: Any) -> dict[str, Any]:
    """A legal call with further arguments behind one of them."""
    made: dict[str, Any] = {}
    for name, value in LEGAL[operator].items():
        made[name] = value
        if name == after:
            made |= more
    return made


def _without(operator: str, *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in LEGAL[operator].items() if name not in left_out}


# Operators that keep the rules of another one: its other releases, and functions like it.
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


# Operators beside another one whose rules they keep.
RELATIVES = {
    "RopeWithSinCosCacheV2": "RopeWithSinCosCache",
    "GroupedMatmulV4": "GroupedMatmulV5",
    "WeightQuantBatchMatmulV3": "WeightQuantBatchMatmulV2",
    "DequantSwigluQuantV2": "DequantSwigluQuant",
    "FusedInferAttentionScoreV5": "FusedInferAttentionScoreV4",
    "MoeDistributeDispatch": "MoeDistributeDispatchV2",
    "MoeDistributeCombine": "MoeDistributeCombineV2",
}
# Rules that hold under a condition, or for an argument that the legal call does without.
CONDITIONS = [
    *(
        replace(case, operator=operator, changes=case.changes)
        for operator, other in RELATIVES.items()
        for case in (*ATTENTION, *CACHES, *NORMS, *PRODUCTS, *QUANTIZATION, *EXPERTS, *LISTS)
        if case.operator == other and case.changes.keys() <= LEGAL[operator].keys()
    ),
    *(
        replace(case, operator=operator, changes={"sink": None, **case.changes})
        for case in ATTENTION
        for operator in ("FusedInferAttentionScoreV4", "FusedInferAttentionScoreV5")
        if case.operator == "FusedInferAttentionScoreV3"
    ),
    Case(
        "AddLora",
        "weight_b",
        "have the size of x's dimension 1 in its dimension 3",
        {"weight_a": None},
    ),
    Case(
        "GridSampler2D",
        "input",
        "be float32 or float16 when interpolation is 2",
        {
            name: Operand(LEGAL["GridSampler2D"][name].sizes, "float64")
            for name in ("input", "grid", "out")
        },
    ),
    Case("LightningIndexer", "returns_values", "be 0", {"returns_values": True}),
    Case("SparseFlashAttention", "query_lengths", "be given", {"query_lengths": None}),
    Case("SparseFlashAttention", "key_lengths", "be given", {"key_lengths": None}),
    Case("SparseFlashAttention", "block_table", "be given", {"block_table": None}),
    Case("SparseFlashAttention", "returns_softmax", "be 0", {"returns_softmax": True}),
    *(
        Case(operator, "active", "be bool", {"active": i8(8)})
        for operator in ("MoeDistributeDispatch", "MoeDistributeDispatchV2")
    ),
    *(
        Case(operator, "active", "be bool", {"active": i8(8)})
        for operator in ("MoeDistributeCombine", "MoeDistributeCombineV2")
    ),
    *(
        Case(operator, argument, rule, {argument: value})
        for operator in ("MoeDistributeDispatch", "MoeDistributeDispatchV2")
        for argument, rule, value in (
            ("smooth", "be float32", t(8, 1024)),
            ("smooth", "have 2 dimensions", f32(1024)),
            ("weights", "be float32", t(8, 8)),
        )
    ),
    Case(
        "QuantMatmulWeightNz",
        "x2",
        "be int8, int32 or int4",
        {"x2": Operand((64, 96), "float16", is_tiled=True)},
    ),
]

CASES = [
    *ATTENTION,
    *CACHES,
    *NORMS,
    *PRODUCTS,
    *QUANTIZATION,
    *EXPERTS,
    *LISTS,
    *ELEMENTS,
    *SISTERS,
    *CONDITIONS,
]

# Of other dtypes than the legal ones: the library casts both operands of a product to float32.
ALSO_LEGAL: dict[str, dict[str, Any]] = (
    {
        f"{operator} of mixed floats": {**LEGAL[operator], **changes}
        for operator, changes in {
            "Mm": {"self": f32(7, 64), "out": f32(7, 96)},
            "Matmul": {"mat2": f16(64, 96), "out": f32(7, 96)},
            "Addmm": {"mat2": f32(64, 96)},
            "BatchMatMul": {"self": f32(2, 7, 64), "out": f32(2, 7, 96)},
        }.items()
    }
    | {
        # Heads over one: up to 64, and of compressed rows each power of 2 up to 128.
        f"FusedInferAttentionScoreV3 of {name}": {**LEGAL["FusedInferAttentionScoreV3"], **changes}
        for name, changes in {
            "64 heads over 1": _sizes(128, 128, 64, 1),
            "256 heads over 4": _sizes(128, 128, 256, 4),
            **{f"{heads} heads over compressed rows": _compressed(heads) for heads in MLA_HEADS},
            "compressed rows in blocks of 16": {**_DECODE, **_blocks_of(16)},
        }.items()
    }
    | {
        # 4-bit weights with a scale per channel and per group of the depth, which is the deepest.
        f"GroupedMatmulV5 of {name}": {**LEGAL["GroupedMatmulV5"], **_HALVED, **changes}
        for name, changes in {
            "4-bit weights": {},
            "4-bit weights for float16": {"out": [f16(6, 128)], "row_scale": [f32(6, 1)]},
            "deep 4-bit weights in groups": {
                "x": [i8(6, 18432)],
                "weight": [i32(4, 18432, 16)],
                "scale": [i64(4, 72, 128)],
            },
        }.items()
    }
)
