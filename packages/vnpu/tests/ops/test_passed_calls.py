"""A call equal to a passed call is not checked again; any difference is checked."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_davinci_testing.operators.first_phase import answer
from vllm_davinci_testing.operators.legal_calls import LEGAL, Operand

pytestmark = pytest.mark.refused_calls

MIB = 1 << 20
NORM = LEGAL["RmsNorm"]
ROWS, WIDTH = NORM["x"].sizes
SHORT_WEIGHT = {**NORM, "gamma": Operand((WIDTH // 2,))}


def test_a_call_that_was_refused_is_refused_again() -> None:
    for _ in range(3):
        assert answer("RmsNorm", NORM) == str(16 * MIB)
        assert "must have the trailing sizes of x" in answer("RmsNorm", SHORT_WEIGHT)


@pytest.mark.parametrize(
    "changes",
    [
        {"y": Operand(NORM["y"].sizes, "float16")},
        {"y": Operand((ROWS + 1, WIDTH))},
        {"x": Operand(NORM["x"].sizes, "float16")},
    ],
    ids=["dtype", "sizes", "dtype of another argument"],
)
def test_one_argument_that_differs_is_checked(changes: dict[str, Operand]) -> None:
    assert answer("RmsNorm", NORM) == str(16 * MIB)
    assert "aclnnRmsNorm returned 161002" in answer("RmsNorm", {**NORM, **changes})


def test_strides_decide_on_the_workspace() -> None:
    apart = {**NORM, "x": Operand((ROWS, WIDTH), apart=True)}
    copied = 2 * ROWS * WIDTH
    for _ in range(2):
        assert answer("RmsNorm", NORM) == str(16 * MIB)
        assert answer("RmsNorm", apart) == str(16 * MIB + copied)


def test_lengths_and_texts_that_differ_are_checked() -> None:
    attention = LEGAL["FusedInferAttentionScoreV3"]
    assert answer("FusedInferAttentionScoreV3", attention).isdigit()
    for changes in ({"query_lengths": (3, 2)}, {"layout": "TDN"}):
        refused = answer("FusedInferAttentionScoreV3", {**attention, **changes})
        assert "aclnnFusedInferAttentionScoreV3 returned 161002" in refused, changes


def test_more_calls_than_are_remembered_and_from_several_threads() -> None:
    def check(rows: int) -> None:
        sizes = {name: Operand((rows, WIDTH)) for name in ("x", "y")}
        legal = {**NORM, **sizes, "rstd": Operand((rows, 1), "float32")}
        assert answer("RmsNorm", legal) == str(16 * MIB)
        assert "has sizes" in answer("RmsNorm", {**legal, "gamma": SHORT_WEIGHT["gamma"]})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, [*range(1, 100)] * 3))
