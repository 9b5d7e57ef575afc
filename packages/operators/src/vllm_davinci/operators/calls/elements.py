"""Element-wise operators, reductions and moves of rows, defined by torch's own operators."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vllm_davinci.operators.calls.call import OperatorCall
from vllm_davinci.operators.calls.operands import DTYPES, FLOAT32, integers, name_of, normal
from vllm_davinci.operators.calls.sizes import ModelSizes

TOKENS = 16
VOCABULARY = 32768  # a part of the models' vocabulary, as on one of several ranks
Row = tuple[str, str, Callable[..., Any]]

# Operators, their launches, their definitions.
OF_ONE: tuple[Row, ...] = (
    ("mul by a number", "Muls", lambda x: x * 0.125),
    ("sigmoid", "Sigmoid", torch.sigmoid),
    ("silu", "Silu", lambda x: functional.silu(x)),
    ("gelu", "Gelu", functional.gelu),
    ("exp", "Exp", torch.exp),
    ("sum", "ReduceSum", lambda x: x.sum(-1)),
)
OF_TWO: tuple[Row, ...] = (
    ("add", "Add", lambda x, y: x + y),
    ("mul", "Mul", lambda x, y: x * y),
    ("sub", "Sub", lambda x, y: x - y),
)
EXACT_OF_ONE: tuple[Row, ...] = (
    ("to float32", "Cast", lambda x: x.float()),
    ("amax", "Amax", lambda x: x.amax(-1)),
    ("masked_fill", "InplaceMaskedFillScalar GtScalar", lambda x: x.masked_fill(x > 1, 0.0)),
    ("transpose", "InplaceCopy", lambda x: x.t().contiguous()),
    ("cat", "Cat", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    ("copy of columns", "InplaceCopy", lambda x: _copied(x)),
)
OF_TABLES: tuple[Row, ...] = (
    ("embedding", "Embedding", lambda table, ids: functional.embedding(ids, table)),
    ("index_select", "IndexSelect", lambda table, ids: table.index_select(0, ids)),
    ("index", "Index", lambda table, ids: table[ids]),
)
# A vocabulary divided among ranks: which tokens are on this rank.
OF_IDS: tuple[Row, ...] = (
    (
        "tokens of other ranks",
        "Subs LtScalar GeScalar InplaceLogicalOr",
        lambda x: (x - VOCABULARY // 4 < 0).logical_or_(x - VOCABULARY // 4 >= VOCABULARY // 2),
    ),
    ("repeat", "Repeat", lambda x: x.unsqueeze(1).repeat(1, 3)),
    (
        "fill",
        "InplaceFillScalar InplaceZero",
        lambda x: torch.cat([torch.full_like(x, 7), torch.zeros_like(x)]),
    ),
)
OF_COUNTS: tuple[Row, ...] = (
    ("cumsum", "Cumsum", lambda x: x.cumsum(-1)),
    ("bincount of experts", "Bincount", lambda x: torch.bincount(x.flatten(), minlength=16)),
)
EXACT_OF_LOGITS: tuple[Row, ...] = (
    ("argmax", "ArgMax", lambda x: x.argmax(-1)),
    ("topk", "Topk", lambda x: x.topk(50)),
    ("sort", "Sort", lambda x: x.sort(-1, descending=True)[0]),
    ("gather", "Gather", lambda x: x.gather(1, x.argmax(-1, keepdim=True))),
)
OF_LOGITS: tuple[Row, ...] = (
    ("softmax", "Softmax", lambda x: x.softmax(-1)),
    ("log_softmax", "LogSoftmax", lambda x: x.log_softmax(-1)),
    ("cumsum", "Cumsum", lambda x: x.softmax(-1).cumsum(-1)),
)


def _copied(x: Tensor) -> Tensor:
    out, half = torch.zeros_like(x), x.shape[1] // 2
    out[:, :half] = x[:, half:]
    return out


def _calls(
    rows: tuple[Row, ...], said: str, operands: Mapping[str, Any], exact: bool = False
) -> Iterator[OperatorCall]:
    for operator, launches, function in rows:
        variant = f"{TOKENS} tokens, {said}"
        yield OperatorCall(operator, launches, variant, operands, function, function, exact)


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype in DTYPES:
        x, y = (normal(TOKENS, model.hidden, dtype=dtype) for _ in range(2))
        yield from _calls(OF_ONE, name_of(dtype), {"x": x})
        yield from _calls(OF_TWO, name_of(dtype), {"x": x, "y": y})
        yield from _calls(EXACT_OF_ONE, name_of(dtype), {"x": x}, exact=True)
    tables = {"table": normal(4096, model.hidden), "ids": integers(0, 4096, TOKENS)}
    yield from _calls(OF_TABLES, "bfloat16", tables, exact=True)
    if model.has_common:
        yield from _calls(OF_IDS, "int64", {"x": integers(0, VOCABULARY, TOKENS)}, exact=True)
        yield from _calls(OF_COUNTS, "int64", {"x": integers(0, 9, TOKENS, 64)}, exact=True)
        logits = {"x": normal(TOKENS, VOCABULARY, dtype=FLOAT32)}
        yield from _calls(OF_LOGITS, "float32", logits)
        yield from _calls(EXACT_OF_LOGITS, "float32", logits, exact=True)
