"""Calls outside CANN's documents are refused with CANN's status, the argument and the rule."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.vnpu.operator_rows import Constraint, constraints
from vllm_davinci_testing.operators import first_phase
from vllm_davinci_testing.operators.edge_calls import edges
from vllm_davinci_testing.operators.generated_calls import breaking, key_of, names, place_of
from vllm_davinci_testing.operators.illegal_calls import ALSO_LEGAL, CASES, Case
from vllm_davinci_testing.operators.legal_calls import LEGAL, RELATIVES
from vllm_davinci_testing.processes.forked import run_together

pytestmark = pytest.mark.refused_calls
AT_NIGHT = pytest.mark.nightly("operators")  # thousands of calls

MIB = 1 << 20
DAILY = ("Ascend910B3", "8.5")  # at night; each other chip and release needs its own process


def of_case(number: int, case: Case) -> Any:
    marks = () if (case.soc, case.cann) == DAILY else (AT_NIGHT,)
    return pytest.param(number, case, id=case.id, marks=marks)


@cache
def answers(soc: str, cann: str, *arguments: str) -> dict[str, Any]:
    variables = {"VNPU_SOC": soc, "VNPU_CANN": cann}
    [ended] = run_together([Path(first_phase.__file__)], [variables], arguments=arguments)
    assert ended.status == 0, ended.output[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("operator", [*LEGAL, *ALSO_LEGAL])
def test_a_call_within_the_documents_passes(operator: str) -> None:
    assert answers(*DAILY)[operator].isdigit(), answers(*DAILY)[operator]


@pytest.mark.parametrize(("number", "case"), [of_case(*each) for each in enumerate(CASES)])
def test_a_call_outside_the_documents_is_refused(number: int, case: Case) -> None:
    said = answers(case.soc, case.cann)[str(number)]
    assert said.startswith(f"aclnn{case.operator} returned {case.code}: "), said
    if case.argument:
        assert f"aclnn{case.operator}: {case.argument} (argument " in said, said
        assert "Source: " in said and f"on {case.soc} with CANN {case.cann}" in said
    assert case.rule in said, said


def at_edges(row: Constraint) -> dict[str, str]:
    """Returns answers to calls at a rule's edges, by the value at the edge."""
    edge = first_phase.AT_EDGES
    said: dict[str, dict[str, str]] = answers(*place_of(row), edge)[edge]
    return said.get(key_of(row), {})


@cache
def rules_of(operator: str) -> list[Constraint]:
    return [row for row in constraints() if row.operator == f"aclnn{operator}"]


def has_case(row: Constraint) -> bool:
    """True if a handwritten call breaks this rule."""
    return any(
        f"aclnn{case.operator}" == row.operator
        and case.argument.replace("_", "").lower() == row.argument.replace("_", "").lower()
        and case.rule in row.rule
        and case.code == row.status
        for case in CASES
    )


@pytest.mark.parametrize("is_daily", [True, pytest.param(False, marks=AT_NIGHT)])
@pytest.mark.parametrize("operator", LEGAL)
def test_calls_that_break_a_rule_are_refused_by_it(operator: str, is_daily: bool) -> None:
    """Calls that break a rule are generated from it, or handwritten if another rule comes first."""
    for row in rules_of(operator):
        if (place_of(row) == DAILY) is not is_daily or not breaking(row, LEGAL[operator]):
            continue
        said = answers(*place_of(row))[key_of(row)]
        assert not any(answer.isdigit() for answer in said), (row, said)
        assert names(row, said[-1]) or has_case(row), (row, said)


# Edges excluded by another rule, because of the legal call's layout or mode, or because several
# arguments share the size.
OF_ATTENTION = {
    "layout: NTD",
    "layout: NTD_TND",
    "query_heads: 1",
    "query_heads: 256",
    "key_heads: 0",
    "key_heads: 256",
    "sparse_mode: 0",
    "sparse_mode: 1",
    "sparse_mode: 2",
    "inner_precise: 1",
    "inner_precise: 2",
    "inner_precise: 3",
}
ELSEWHERE: dict[str, set[str]] = {
    "Convolution": {"input: 3 dimensions", "input: 5 dimensions"},
    "DequantBias": {"weight_scale: float32", "out: float16"},
    "DequantSwigluQuant": {"x: 2 in dimension -1", "x: 1073741824 in dimension -1"},
    "FlashAttentionScore": {"layout: BSND", "layout: BNSD"},
    "FusedInferAttentionScoreV2": OF_ATTENTION,
    "FusedInferAttentionScoreV3": OF_ATTENTION,
    "FusedInferAttentionScoreV4": OF_ATTENTION,
    "GridSampler2D": {"input: float64"},
    "GroupedMatmulV5": {"x: 6 dimensions", "group_list: 2 dimensions"},
    "GroupedMatmulWeightNz": {
        "x: float16",
        "x: bfloat16",
        "x: 6 dimensions",
        "group_list: 2 dimensions",
        "group_type: 2",
    },
    "LightningIndexer": {"weights: float16", "query_layout: BSND", "key_layout: TND"},
    "MoeFinalizeRoutingV2": {"drop_pad_mode: 1", "drop_pad_mode: 3"},
    "MoeGatingTopK": {"x: 1 in dimension -1"},
    "OneHot": {"num_classes: 0", "num_classes: 2147483647"},
    "QuantMatmulV5": {"x2_scale: int64", "x2_scale: uint64", "out: int8", "out: int32"},
    "QuantMatmulWeightNz": {"x2_scale: int64", "x2_scale: uint64", "out: int8", "out: int32"},
    "Quantize": {"zero_points: bfloat16"},
    "RmsNorm": {"x: 1 dimensions"},
    "SparseFlashAttention": {"query_layout: BSND", "key_layout: TND"},
    "ScatterPaKvCache": {
        "key: 4 dimensions",
        "key_cache: 5 dimensions",
        "slot_mapping: 2 dimensions",
        "cache_mode: PA_NZ",
    },
    "WeightQuantBatchMatmulV2": {
        "x: float16",
        "scale: float16",
        "scale: int64",
        "scale: uint64",
        "offset: float16",
        "offset: int32",
    },
}
ELSEWHERE |= {
    operator: ELSEWHERE[other] for operator, other in RELATIVES.items() if other in ELSEWHERE
}


@AT_NIGHT
@pytest.mark.parametrize("operator", LEGAL)
def test_calls_at_the_edge_of_a_rule_pass(operator: str) -> None:
    """Calls at a rule's edges are generated from it: each listed dtype, smallest and largest
    sizes.
    """
    refused = set()
    for row in rules_of(operator):
        for value, said in at_edges(row).items():
            assert not names(row, said), f"the rule refuses what it allows: {value}: {said}"
            if not said.isdigit():
                refused.add(f"{row.argument}: {value}")
    assert refused == ELSEWHERE.get(operator, set())


@AT_NIGHT
def test_most_rules_have_calls_at_their_edges() -> None:
    found = [
        said
        for row in constraints()
        if row.operator.removeprefix("aclnn") in LEGAL
        for said in answers(*place_of(row), first_phase.AT_EDGES)[first_phase.AT_EDGES]
        .get(key_of(row), {})
        .values()
    ]
    assert len(found) > 1800
    assert sum(each.isdigit() for each in found) > 0.9 * len(found)


# Allowed numbers of dimensions of tiled weights; their tiles have two more.
WITHOUT_A_CALL = {("GroupedMatmulWeightNz", "weight"), ("QuantMatmulWeightNz", "x2")}


def test_every_rule_has_a_call_of_its_own() -> None:
    """Every rule has a call that breaks it, or one at its edge."""
    bare = {
        (operator, row.argument)
        for row in constraints()
        if (operator := row.operator.removeprefix("aclnn"))
        and not has_case(row)
        and not breaking(row, LEGAL[operator])
        and not edges(row, LEGAL[operator])
    }
    assert bare == WITHOUT_A_CALL


@pytest.mark.parametrize(
    ("operator", "least"),
    [
        ("RmsNorm", 16 * MIB),
        ("ScatterPaKvCache", 16 * MIB),
        ("Mm", 20 * MIB),
        ("TransposeBatchMatMul", 24 * MIB),
        ("InterleaveRope", 32),
        ("KvRmsNormRopeCache", 32),
    ],
)
def test_an_operator_asks_for_its_workspace(operator: str, least: int) -> None:
    assert int(answers(*DAILY)[operator]) == least
