"""Element by element, reductions, and what moves rows: torch's own operators, which define them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import DTYPES, name_of, normal
from vllm_davinci.verify.operators.shapes import ModelSizes

TOKENS = 16
VOCABULARY = 32768  # a part of the models' own, as one rank of several has


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype in DTYPES:
        yield from _of_floats(model, dtype)
    yield from _of_rows(model)
    yield from _of_masks(model)
    yield from _of_logits(model)


def _same(
    operator: str,
    launches: str,
    variant: str,
    make: Callable[[Generator], dict[str, Any]],
    function: Callable[..., Any],
    exact: bool = False,
) -> OperatorCall:
    return OperatorCall(operator, launches, variant, make, function, function, exact)


def _of_floats(model: ModelSizes, dtype: torch.dtype) -> Iterator[OperatorCall]:
    said = f"{TOKENS} tokens, {name_of(dtype)}"

    def two(generator: Generator) -> dict[str, Any]:
        return {
            "x": normal(generator, TOKENS, model.hidden, dtype=dtype),
            "y": normal(generator, TOKENS, model.hidden, dtype=dtype),
        }

    def one(generator: Generator) -> dict[str, Any]:
        return {"x": two(generator)["x"]}

    yield _same("add", "Add", said, two, lambda x, y: x + y)
    yield _same("mul", "Mul", said, two, lambda x, y: x * y)
    yield _same("sub", "Sub", said, two, lambda x, y: x - y)
    yield _same("mul by a number", "Muls", said, one, lambda x: x * 0.125)
    yield _same("sigmoid", "Sigmoid", said, one, torch.sigmoid)
    yield _same("silu", "Silu", said, one, lambda x: torch.nn.functional.silu(x))
    yield _same("gelu", "Gelu", said, one, torch.nn.functional.gelu)
    yield _same("exp", "Exp", said, one, torch.exp)
    yield _same("to float32", "Cast", said, one, lambda x: x.float(), exact=True)
    yield _same("sum", "ReduceSum", said, one, lambda x: x.sum(-1))
    yield _same("amax", "Amax", said, one, lambda x: x.amax(-1), exact=True)


def _of_rows(model: ModelSizes) -> Iterator[OperatorCall]:
    said = f"{TOKENS} tokens, bfloat16"

    def rows(generator: Generator) -> dict[str, Any]:
        return {
            "table": normal(generator, 4096, model.hidden),
            "ids": torch.randint(0, 4096, (TOKENS,), generator=generator),
        }

    def slices(generator: Generator) -> dict[str, Any]:
        return {"x": normal(generator, TOKENS, model.hidden)}

    half = model.hidden // 2

    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(x > 1, 0.0)

    def copied(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :half] = x[:, half:]
        return out

    yield _same(
        "embedding",
        "Embedding",
        said,
        rows,
        lambda table, ids: torch.nn.functional.embedding(ids, table),
        exact=True,
    )
    yield _same(
        "index_select",
        "IndexSelect",
        said,
        rows,
        lambda table, ids: table.index_select(0, ids),
        exact=True,
    )
    yield _same("index", "Index", said, rows, lambda table, ids: table[ids], exact=True)
    yield _same(
        "cat", "Cat", said, slices, lambda x: torch.cat([x[:, half:], x[:, :half]], 1), exact=True
    )
    yield _same("masked_fill", "InplaceMaskedFillScalar GtScalar", said, slices, masked, exact=True)
    yield _same("copy of columns", "InplaceCopy", said, slices, copied, exact=True)
    yield _same("transpose", "InplaceCopy", said, slices, lambda x: x.t().contiguous(), exact=True)


def _of_masks(model: ModelSizes) -> Iterator[OperatorCall]:
    """A vocabulary that is divided among ranks: which tokens are here, and what is not."""
    if model.name != "qwen3-8b":
        return
    said = "16 tokens, int64"

    def ids(generator: Generator) -> dict[str, Any]:
        return {"x": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)}

    def elsewhere(x: Tensor) -> Tensor:
        own = x - VOCABULARY // 4
        return (own < 0).logical_or_(own >= VOCABULARY // 2)

    yield _same(
        "tokens of other ranks",
        "Subs LtScalar GeScalar InplaceLogicalOr",
        said,
        ids,
        elsewhere,
        exact=True,
    )
    yield _same("repeat", "Repeat", said, ids, lambda x: x.unsqueeze(1).repeat(1, 3), exact=True)
    yield _same(
        "fill",
        "InplaceFillScalar InplaceZero",
        said,
        ids,
        lambda x: torch.cat([torch.full_like(x, 7), torch.zeros_like(x)]),
        exact=True,
    )


def _of_logits(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.name != "qwen3-8b":  # the sampler's are of no model
        return
    said = "16 tokens, float32"

    def logits(generator: Generator) -> dict[str, Any]:
        return {"x": normal(generator, TOKENS, VOCABULARY, dtype=torch.float32)}

    def counts(generator: Generator) -> dict[str, Any]:
        return {"x": torch.randint(0, 9, (TOKENS, 64), generator=generator)}

    yield _same("argmax", "ArgMax", said, logits, lambda x: x.argmax(-1), exact=True)
    yield _same("topk", "Topk", said, logits, lambda x: x.topk(50), exact=True)
    yield _same("sort", "Sort", said, logits, lambda x: x.sort(-1, descending=True)[0], exact=True)
    yield _same("softmax", "Softmax", said, logits, lambda x: x.softmax(-1))
    yield _same("log_softmax", "LogSoftmax", said, logits, lambda x: x.log_softmax(-1))
    yield _same("cumsum", "Cumsum", said, logits, lambda x: x.softmax(-1).cumsum(-1))
    yield _same(
        "gather",
        "Gather",
        said,
        logits,
        lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
        exact=True,
    )
    yield _same("cumsum", "Cumsum", "16 tokens, int64", counts, lambda x: x.cumsum(-1), exact=True)
    yield _same(
        "bincount of experts",
        "Bincount",
        "16 tokens, int64",
        counts,
        lambda x: torch.bincount(x.flatten(), minlength=16),
        exact=True,
    )
