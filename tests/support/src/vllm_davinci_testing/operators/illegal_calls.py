"""Calls that CANN's documents do not allow, for rules from which none can be generated.

A case changes a legal call's arguments to break a special or conditional rule; `generated_calls`
makes calls that break the other rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vllm_davinci_testing.operators.legal_calls import (
    A2,
    A310P,
    DECODE,
    LEGAL,
    MASK,
    PREFILL,
    RELATIVES,
    Operand,
    f16,
    f32,
    i8,
    i32,
    i64,
    ints,
    of_bools,
    t,
    tensor_list,
    word,
)

PARAMETER = 161002
TILING = 561002


@dataclass(frozen=True)
class Case:
    """
    operator: name without aclnn
    argument: argument that the refusal names
    rule:     part of the rule in the refusal
    changes:  replacements for the legal call's arguments
    code:     CANN's status
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


def _case(operator: str, argument: str, rule: str, code: int = PARAMETER, **changes: Any) -> Case:
    return Case(operator, argument, rule, changes, code)


_attention = partial(_case, "FusedInferAttentionScoreV3")


def _decode(argument: str, rule: str, **changes: Any) -> Case:
    return _attention(argument, rule, TILING, **{**DECODE, **changes})


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
    """Makes compressed rows in blocks of this size; two requests have tables of 16 blocks each."""
    return {
        "key": [t(16, tokens, 512)],
        "value": [t(16, tokens, 512)],
        "key_rope": t(16, tokens, 64),
        "block_table": i32(2, 16),
        "block_size": tokens,
    }


def _compressed(heads: int) -> dict[str, Any]:
    return {
        **DECODE,
        "query": t(2, heads, 512),
        "query_rope": t(2, heads, 64),
        "query_heads": heads,
        "out": t(heads, 2, 512),
    }


_EQUAL = "equal head sizes of 64 or 128"

# fmt: off
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
        "key_lengths", "end with the tokens of key", **{**PREFILL, "key_lengths": ints(3, 6)}
    ),
    _attention("query_lengths", "no request more queries than keys", key_lengths=ints(130, 3)),
    _attention(
        "query_lengths", "at most 4096 entries", TILING, query=t(4097, 8, 128), out=t(4097, 8, 128),
        query_lengths=ints(*range(1, 4098)), key_lengths=ints(*[1] * 4097),
        block_table=i32(4097, 1)
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
        "FusedInferAttentionScoreV3", "block_size", "be a multiple of 16, at most 1024",
        {"block_size": 1040, "key": [t(6, 1040, 256)], "value": [t(6, 1040, 256)]}, cann="9.0"
    ),
    _attention("key", "have blocks of blockSize tokens", block_size=64, block_table=i32(2, 3)),
    _attention(
        "key", "rows of at most 65535 entries",
        **_sizes(512, 512, 256, 256, mask=None, sparse_mode=0)
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
        "FusedInferAttentionScoreV3", "query", "equal ones up to 256 with fewer key heads",
        _sizes(256, 256, 8, 8), TILING, cann="9.0"
    ),
    Case("FusedInferAttentionScoreV2", "query", _EQUAL, _sizes(80, 80, 8, 2), TILING),
    # Sinks.
    Case("FusedInferAttentionScoreV4", "sink", "an entry for each head", {"sink": t(4)}, TILING),
    Case(
        "FusedInferAttentionScoreV4", "value", "heads of 64 or 128 entries beside learnableSink",
        _sizes(80, 80, 8, 2), TILING, cann="9.0"
    ),
    Case(
        "FusedInferAttentionScoreV4", "inner_precise", "be 0 when",
        {**_sizes(128, 128, 8, 8), "inner_precise": 1}, TILING
    ),
    # CANN 8.3.
    Case("FusedInferAttentionScoreV3", "block_table", "be null", {}, TILING, cann="8.3"),
    Case(
        "FusedInferAttentionScoreV3",
        "query",
        "be bfloat16",
        {
            **PREFILL,
            "query": f16(7, 8, 128),
            "key": [f16(7, 2, 128)],
            "value": [f16(7, 2, 128)],
            "out": f16(7, 8, 128),
        },
        TILING,
        cann="8.3",
    ),
    Case("FusedInferAttentionScoreV3", "query_heads", "32, 64 or 128", DECODE, TILING, cann="8.3"),
    Case(
        "FusedInferAttentionScoreV3", "wants_lse", "be 0",
        {**_compressed(32), "wants_lse": True, "lse": f32(2, 32, 1)}, TILING, cann="8.3"
    ),
    # MLA.
    _attention("key_rope", "be given when query_rope", **{**DECODE, "key_rope": None}),
    _attention("query_rope", "be given when key_rope", **{**DECODE, "query_rope": None}),
    _attention("query_rope", "dtype of query", **{**DECODE, "query_rope": f16(2, 16, 64)}),
    _attention("key_rope", "dtype of key", **{**DECODE, "key_rope": f16(6, 128, 64)}),
    _decode("query_rope", "have size 64", query_rope=t(2, 16, 32)),
    _attention(
        "query_rope", "the tokens and heads of query", **{**DECODE, "query_rope": t(2, 8, 64)}
    ),
    _decode(
        "query", "equal head sizes of 128, or of 512", query=t(2, 16, 256), key=[t(6, 128, 256)]
    ),
    _decode("query_rope", "be given when the heads", query_rope=None, key_rope=None),
    _decode(
        "block_table", "be given when the heads", block_table=None, key=[t(9, 1, 512)],
        value=[t(9, 1, 512)], key_rope=t(9, 1, 64), key_lengths=ints(4, 9)
    ),
    _decode("key_heads", "be 1", key_heads=2, key=[t(6, 128, 1024)], value=[t(6, 128, 1024)]),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(20)),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(129)),
    _decode("query_heads", "be 1, 2, 4, 8, 16, 32, 64 or 128", **_compressed(256)),
    _decode(
        "query_lengths", "no request more than 16 queries", query=t(18, 16, 512),
        query_rope=t(18, 16, 64), query_lengths=ints(17, 18), mask=MASK, sparse_mode=3,
        out=t(16, 18, 512)
    ),
    _decode(
        "query_lengths", "a single query under sparseMode 0", query=t(3, 16, 512),
        query_rope=t(3, 16, 64), query_lengths=ints(2, 3), out=t(16, 3, 512)
    ),
    Case("FusedInferAttentionScoreV3", "", "has no such operator", {}, TILING, soc=A310P),
]
# fmt: on


_scatter = partial(_case, "ScatterPaKvCache")
_gather = partial(_case, "GatherPaKvCache")
_norm_rope = partial(_case, "KvRmsNormRopeCache")
_rotary = partial(_case, "RopeWithSinCosCache")


# fmt: off
CACHES = [
    _scatter("value", "tokens and heads of key", value=t(6, 2, 128)),
    _scatter("key_cache", "hold the heads of key", key_cache=t(3, 128, 4, 128)),
    _scatter("key_cache", "a slot for each token", key_cache=t(1, 4, 2, 128)),
    _scatter(
        "key_cache", "end in pieces of 32 bytes", cache_mode="PA_NZ", key_cache=t(3, 8, 128, 32),
        value_cache=t(3, 16, 128, 16)
    ),
    _scatter(
        "value_cache", "end in pieces of 32 bytes", cache_mode="PA_NZ", key_cache=t(3, 16, 128, 16),
        value_cache=t(3, 8, 128, 32)
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
        "SparseFlashAttention", "sparse_block_size", "divide the block size",
        {"sparse_block_size": 48}
    ),
]
# fmt: on

# fmt: off
NORMS = [
    Case(
        "RmsNorm", "x", "a last dimension of at least 32 bytes",
        {"x": f16(7, 8), "gamma": f16(8), "y": f16(7, 8)}, TILING, soc=A310P
    ),
    Case("RmsNorm", "gamma", "trailing sizes of x", {"gamma": t(128)}),
    Case("AddRmsNorm", "gamma", "trailing sizes of x1", {"gamma": t(128)}),
    Case("AddRmsNormDynamicQuantV2", "gamma", "trailing sizes of x1", {"gamma": t(128)}),
    Case("SwiGlu", "x", "an even size in dimension dim", {"x": t(7, 255)}),
]
# fmt: on


_transposed = partial(_case, "TransposeBatchMatMul")
_quantized = partial(_case, "QuantMatmulV5")
_grouped = partial(_case, "GroupedMatmulV5")


# 8-bit rows and 4-bit weights, with groups along the depth, and block scales of both.
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
# 8-bit rows and 4-bit weights, by expert.
_HALVED = {
    "weight": [i32(4, 64, 16)],
    "bias": [f32(4, 128)],
    "scale": [i64(4, 1, 128)],
    "out": [t(6, 128)],
}
_STATIC = {"row_scale": None}
# Integer weights and float rows.
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


_weight_only = partial(_case, "WeightQuantBatchMatmulV2")


# fmt: off
PRODUCTS = [
    Case("Mm", "mat2", "inner size of self", {"mat2": t(32, 96)}),
    Case("Addmm", "mat2", "inner size of mat1", {"mat2": t(32, 96)}),
    Case("BatchMatMul", "mat2", "inner size of self", {"mat2": t(2, 32, 96)}),
    Case("Baddbmm", "batch2", "inner size of batch1", {"batch2": t(2, 32, 96)}),
    _transposed("x2", "dtype of x1", x2=f16(16, 128, 512)),
    _transposed("permute_x1", "be 0 1 2 or 1 0 2", permute_x1=ints(2, 0, 1)),
    _transposed("permute_x2", "be 0 1 2", permute_x2=ints(0, 2, 1)),
    _transposed("permute_y", "be 1 0 2", permute_y=ints(0, 1, 2)),
    _transposed("x1", "fewer than 65536 entries", TILING, x1=t(7, 128, 512), x2=t(128, 512, 128)),
    _transposed("scale", "be int64 or uint64", scale=f32(512)),
    _transposed("out", "dtype of x1", out=f16(7, 16, 512)),
    _quantized("x2_scale", "float32 or bfloat16 when out is bfloat16", x2_scale=i64(96)),
    _quantized(
        "x2_scale", "int64 or uint64 when out is float16 and x1_scale is null", x1_scale=None,
        out=f16(5, 96)
    ),
    _quantized(
        "x2_scale", "float32 when out is float16 and x1_scale is given", x2_scale=t(96),
        out=f16(5, 96)
    ),
    _quantized("x2_scale", "int64 or uint64 when out is int8", out=i8(5, 96), x1_scale=None),
    _quantized("x1_scale", "an entry for each row", x1_scale=f32(4)),
    _quantized("x1_scale", "be null when out is int32", out=i32(5, 96)),
    _quantized("bias", "when out is bfloat16", bias=f16(96)),
    _quantized("bias", "int32, float32 or float16 when out is float16", bias=t(96), out=f16(5, 96)),
    _quantized("bias", "int32 when out is int32", bias=f32(96), out=i32(5, 96), x1_scale=None),
    _quantized(
        "bias", "int32 when out is float16 and x1_scale is null", bias=f16(96), out=f16(5, 96),
        x1_scale=None, x2_scale=i64(96)
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
        "QuantMatmulWeightNz", "x2", "more than one row and column",
        {"x2": Operand((64, 1), "int8", is_tiled=True), "x2_scale": f32(1), "out": t(5, 1)}, TILING
    ),
    _weight_only("weight", "be contiguous, or the transpose", weight=i8(64, 96)(apart=True)),
    _weight_only("weight", "size of x's dimension 1", weight=i8(32, 96)),
    _weight_only("scale", "dtype of x, or be int64", scale=f16(96)),
    _weight_only("scale", "a row for each group", scale=t(2, 96)),
    _weight_only("scale", "a row for each group", scale=t(1, 96), group_size=word(32)),
    _weight_only("x", "be float16 when scale", scale=i64(96), offset=None),
    _weight_only(
        "weight", "be int8 when scale", x=f16(7, 64), weight=i32(64, 12), scale=i64(96),
        offset=None, bias=None, out=f16(7, 96)
    ),
    _weight_only("offset", "dtype of x, or be int32", offset=f16(96)),
    _weight_only("scale", "int64 or uint64 when offset", offset=i32(96)),
    _weight_only("out_scale", "be uint64", out_scale=i64(96), out=i8(7, 96)),
    _weight_only("out_scale", "be given when out is int8", out=i8(7, 96)),
    _weight_only("bias", "be float32 when x is bfloat16", bias=f16(96)),
    _weight_only(
        "bias", "be float16 when x is float16", x=f16(7, 64), scale=f16(96), offset=None,
        out=f16(7, 96)
    ),
    _weight_only(
        "group_size", "be 0, or a multiple of 32", group_size=word(16), scale=t(4, 96),
        offset=t(4, 96)
    ),
    _weight_only(
        "out", "1 to 65535", weight=i8(64, 65536), scale=t(65536), offset=None, bias=None,
        out=t(7, 65536)
    ),
    _weight_only("out", "be int8 when out_scale is given", out_scale=Operand((96,), "uint64")),
    _weight_only("out", "dtype of x when out_scale", out=f16(7, 96)),
    _weight_only(
        "out", "when weight lies in FRACTAL_NZ", weight=Operand((64, 96), "int8", is_tiled=True),
        out_scale=Operand((96,), "uint64"), out=i8(7, 96)
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
        "activation", "be 0 when out is int32", activation=2, out=[i32(6, 96)], scale=None,
        **_STATIC
    ),
    _widened("weight_scale", "be given when", weight_scale=None),
    _widened("weight_offset", "be given when", weight_offset=None),
    _widened("weight_scale", "dtype of x when", weight_scale=[f32(4, 96)]),
    _widened("weight_offset", "dtype of x when", weight_offset=[f32(4, 96)]),
    _widened("weight_offset", "sizes of weight_scale", weight_offset=[t(4, 1, 96)]),
    _widened(
        "weight_scale", "size of out's last dimension", weight_scale=[t(4, 32)],
        weight_offset=[t(4, 32)]
    ),
    _widened(
        "weight_scale", "a row for each matrix of weight", weight_scale=[t(4, 2, 96)],
        weight_offset=[t(4, 2, 96)]
    ),
    _widened(
        "weight_scale", "a row for each matrix of weight", weight_scale=[t(3, 96)],
        weight_offset=[t(3, 96)]
    ),
    _widened(
        "weight_scale", "a number of groups that divides", weight=[i32(4, 64, 12)],
        weight_scale=[t(4, 3, 96)], weight_offset=[t(4, 3, 96)]
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
        "GroupedMatmulWeightNz", "weight", "whole tiles",
        {"weight": [Operand((4, 64, 80), "int8", is_tiled=True)]}
    ),
    Case(
        "GroupedMatmulWeightNz", "weight", "whole tiles",
        {"weight": [Operand((4, 40, 96), "int8", is_tiled=True)], "x": [i8(6, 40)]}
    ),
    Case("GroupedMatmulWeightNz", "group_type", "be -1 or 0", {"group_type": 2}),
]
# fmt: on


_swiglu = partial(_case, "DequantSwigluQuant")


def _wide(columns: int) -> dict[str, Any]:
    return {"x": i32(7, columns), "weight_scale": f32(4, columns), "y": i8(7, columns // 2)}


# fmt: off
QUANTIZATION = [
    Case("DynamicQuant", "scale", "an entry for each row", {"scale": f32(6)}),
    Case("DynamicQuant", "smooth", "dtype of x", {"smooth": f32(64)}),
    Case("DynamicQuant", "y", "sizes of x", {"y": i8(6, 64)}),
    Case(
        "Quantize", "scales", "one entry, or one for each",
        {"scales": f32(32), "zero_points": None}
    ),
    Case("Quantize", "scales", "be bfloat16 when zero_points", {"zero_points": t(64)}),
    Case(
        "Quantize", "x", "be bfloat16 when scales",
        {"x": f16(7, 64), "scales": t(64), "zero_points": None}
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
# fmt: on


_init = partial(_case, "MoeInitRoutingV3")
_gate = partial(_case, "MoeGatingTopK")


# fmt: off
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
        "groups", "at most 2048 experts when", TILING, x=f32(7, 528), bias=f32(528),
        scores=f32(7, 528), groups=66
    ),
    _gate("chosen_groups", "be 1 to groupCount", chosen_groups=9),
    _gate("k", "be 1 to the experts", k=17),
    Case("MoeGatingTopKSoftmaxV2", "finished", "be bool", {"finished": i32(7)}),
    Case("MoeGatingTopKSoftmaxV2", "k", "be 1 to 1024", {"k": 65}),
    Case("MoeGatingTopKSoftmaxV2", "k", "be 1 to 1024", {"k": 0}),
    Case(
        "MoeGatingTopKSoftmaxV2", "softmax_out", "be float32",
        {"wants_softmax": True, "softmax_out": t(7, 64)}
    ),
    Case("MoeFinalizeRoutingV2", "rows", "have 2 dimensions", {"rows": t(1, 14, 64)}),
    Case("MoeFinalizeRoutingV2", "rows", "have 3 dimensions", {"drop_pad_mode": 3}),
    Case("MoeFinalizeRoutingV2", "scales", "dtype of rows, or be float32", {"scales": f16(7, 2)}),
    Case("MoeFinalizeRoutingV2", "scales", "an entry for each", {"scales": t(7, 3)}),
    Case("MoeFinalizeRoutingV2", "skip1", "dtype of rows", {"skip1": f32(7, 64)}),
    Case(
        "MoeFinalizeRoutingV2", "skip2", "dtype of rows", {"skip1": t(7, 64), "skip2": f32(7, 64)}
    ),
    Case(
        "MoeFinalizeRoutingV2", "expert_index", "be int32",
        {"bias": t(8, 64), "expert_index": i64(7, 2)}
    ),
    Case("MoeFinalizeRoutingV2", "skip2", "be null when skip1", {"skip2": t(7, 64)}),
    Case(
        "MoeFinalizeRoutingV2", "bias", "dtype of rows",
        {"bias": f32(8, 64), "expert_index": i32(7, 2)}
    ),
    Case("MoeFinalizeRoutingV2", "expert_index", "be given when bias", {"bias": t(8, 64)}),
]
# fmt: on


LISTS = [
    Case("ForeachCopy", "x", "be float32", {"x": tensor_list("complex64")}),
    Case("ForeachCopy", "", "Ascend310P3 has no such operator", {}, TILING, A310P),
    Case("ForeachCopy", "out", "as many entries as x", {"out": [f16(3)]}),
    Case("ForeachCopy", "out", "sizes of x, each", {"out": [f16(3), f16(4, 2)]}),
]


# fmt: off
ELEMENTS = [
    Case("IndexPutImpl", "indices", "int32, int64 or bool", {"indices": [i8(5)]}),
    Case("FastLayerNorm", "weight", "trailing sizes of input", {"weight": t(32)}),
    Case("FastLayerNorm", "bias", "trailing sizes of input", {"bias": t(32)}),
    Case("Index", "indices", "int32, int64 or bool", {"indices": [f32(0), i8(5)]}),
    Case("ArgMax", "dim", "be a dimension of self", {"dim": 2}),
    Case("MaxDim", "dim", "be a dimension of self", {"dim": -3}),
    Case("OneHot", "out", "be float16", {"on": t(1), "off": t(1), "out": t(7, 5)}),
    Case("OneHot", "axis", "be -1, or at most the dimensions of self", {"axis": 2}),
    Case("OneHot", "axis", "be -1, or at most the dimensions of self", {"axis": -2}),
    Case("OneHot", "out", "have the sizes of self, and numClasses at axis", {"axis": 0}),
    Case(
        "UpsampleBilinear2d", "output_size", "the last two sizes of out",
        {"output_size": ints(7, 6)}
    ),
    Case("UpsampleBilinear2d", "scales_h", "not be negative", {"scales_h": -1.0}),
    Case("UpsampleBilinear2d", "scales_w", "not be negative", {"scales_w": -1.0}),
    Case("FlashAttentionScore", "", "Ascend310P3 has no such operator", {}, TILING, A310P),
    Case("FlashAttentionScore", "layout", "have a letter for each dimension", {"layout": "BSND"}),
    Case("FlashAttentionScore", "query", "have heads of at most 768", {"query": t(2, 7, 769 * 4)}),
    Case("FlashAttentionScore", "key", "of the size of query's", {"key": t(2, 9, 100)}),
    Case("FlashAttentionScore", "value", "at most the size of query's", {"value": t(2, 9, 128)}),
    Case("FlashAttentionScore", "bias", "have the dtype of query", {"bias": f32(2, 4, 7, 9)}),
    Case("FlashAttentionScore", "drop_mask", "be uint8", {"drop_mask": of_bools(64)}),
    Case("LayerNorm", "weight", "trailing sizes of input", {"weight": t(32)}),
    Case("LayerNorm", "bias", "trailing sizes of input", {"bias": t(32)}),
    Case("Convolution", "stride", "a number for each dimension", {"stride": ints(4)}),
    Case("Convolution", "dilation", "a number for each dimension", {"dilation": ints(1, 1, 1)}),
]
# fmt: on


def _of_sister(case: Case, operator: str) -> Case:
    """Returns the same call of another operator with the case's rules."""
    return replace(case, operator=operator)


def _tiled(case: Case, operator: str) -> Case:
    """Returns the same call of an operator whose weight is in tiles."""

    def in_tiles(value: Any) -> Any:
        if isinstance(value, list):
            return [in_tiles(each) for each in value]
        return value(is_tiled=True) if isinstance(value, Operand) and value.sizes[1:] else value

    weights = {name: in_tiles(case.changes[name]) for name in case.changes if name in _WEIGHTS}
    return replace(case, operator=operator, changes={**case.changes, **weights})


_WEIGHTS = ("weight", "x2")
_OF_MLA = {"query_rope", "key_rope"}
# Operators that apply another operator's rules to their arguments. fmt: off
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
    Case(  # the matrix is a whole number of tiles
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
# fmt: on


# Conditional rules, or rules for an argument that the legal call omits. fmt: off
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
# fmt: on

# fmt: off
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
# fmt: on

# Illegal dtypes, because the library casts both operands of a product to float32.
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
        # Up to 64 query heads per key head; with compressed rows, each power of 2 up to 128.
        f"FusedInferAttentionScoreV3 of {name}": {**LEGAL["FusedInferAttentionScoreV3"], **changes}
        for name, changes in {
            "64 heads over 1": _sizes(128, 128, 64, 1),
            "256 heads over 4": _sizes(128, 128, 256, 4),
            **{f"{heads} heads over compressed rows": _compressed(heads) for heads in MLA_HEADS},
            "compressed rows in blocks of 16": {**DECODE, **_blocks_of(16)},
        }.items()
    }
    | {
        # 4-bit weights with a scale per channel, and per group of the depth, at the greatest depth.
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
