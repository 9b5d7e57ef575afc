"""Rotary embeddings."""

from collections.abc import Iterator
from itertools import product

from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import DTYPES, cos_sin, integers, name_of, normal, table
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.rotary import rotary_embedding, rotated_pairs

POSITIONS = 4096


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype, tokens in product(DTYPES, (16, 200)):
        said = f"{tokens} tokens, {name_of(dtype)}"
        if model.latent:
            rope = model.latent.rope
            yield OperatorCall(
                "npu_interleave_rope", "InterleaveRope", said,
                {
                    "x": normal(tokens, model.heads, 1, rope, dtype=dtype),
                    **cos_sin(tokens, 1, 1, rope, dtype=dtype),
                },
                lambda x, cos, sin: npu.npu_interleave_rope(x, cos, sin), rotated_pairs,
            )  # fmt: skip
            continue
        size = model.head_size
        yield OperatorCall(
            "npu_mrope", "RopeWithSinCosCache", said,
            {
                "positions": integers(0, POSITIONS, tokens),
                "query": normal(tokens, model.heads * size, dtype=dtype),
                "key": normal(tokens, model.kv_heads * size, dtype=dtype),
                "table": table(POSITIONS, model.rotary_size, dtype),
            },
            lambda positions, query, key, table, size=size: npu.npu_mrope(
                positions, query, key, table, size, mrope_section=[0, 0, 0], rotary_mode="half"
            ),
            lambda positions, query, key, table, size=size: rotary_embedding(
                positions, query, key, table, size, True
            ),
        )  # fmt: skip
