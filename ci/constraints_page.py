"""Writes the page of operators' constraints: each row with its test calls."""

from dataclasses import replace
from typing import Any

from reference_cells import GENERATED, cell
from vllm_davinci_testing.operators.edge_calls import edges
from vllm_davinci_testing.operators.generated_calls import breaking, place_of
from vllm_davinci_testing.operators.illegal_calls import CASES
from vllm_davinci_testing.operators.legal_calls import A310P, LEGAL


def operator_constraints_page(constraints: list[Any], launched: set[str]) -> str:
    """Writes the page; operators with the same rows share a section.

    launched: operators that vllm-davinci-kernels launches
    """
    rows_of: dict[str, list[Any]] = {}
    for row in constraints:
        rows_of.setdefault(row.operator, []).append(row)
    sections: dict[tuple[Any, ...], list[str]] = {}
    for operator, own in sorted(rows_of.items()):
        shared = tuple(replace(row, operator="", form=None) for row in own)
        sections.setdefault(shared, []).append(operator)
    body, untested, at_edges, bare = "", 0, 0, 0
    for operators in sections.values():
        rows = rows_of[operators[0]]
        tests = [
            _written(row, operators) or ("made" if _is_broken(row, operators) else 0)
            for row in rows
        ]
        allowed = [_at_edges(row, operators) for row in rows]
        untested += tests.count(0)
        at_edges += sum(allowed)
        bare += sum(not any(each) for each in zip(tests, allowed, strict=True))
        body += f"\n## {', '.join(operators)}\n\n"
        body += "| argument | must | where | status | source | forbidden | allowed |\n"
        body += "| --- | --- | --- | --- | --- | --- | --- |\n"
        for row, number, edge in zip(rows, tests, allowed, strict=True):
            releases = row.since if row.since == row.until else f"{row.since} to {row.until}"
            cells = (row.argument, cell(row.rule), f"{row.chips}; CANN {releases}")
            body += f"| `{cells[0]}` | {cells[1]} | {cells[2]} "
            body += f"| {row.status} | {cell(row.source)} | {number} | {edge} |\n"
    written = sum(map(len, sections))
    return (
        "# Constraints of operators\n\n"
        + GENERATED.format(source="packages/vnpu/csrc/ops/**/*.cpp")
        + f"{len(constraints)} rows restrict {len(rows_of)} operators to what CANN documents; "
        f"operators that share rows share a section below: {written} rows. A call that breaks a "
        "row is refused with the status and the rule of the row. Tests make such calls: "
        f"{len(CASES)} are written by hand (`vllm_davinci_testing.operators.illegal_calls`), those "
        f"of rows marked `made` follow from the rule (`generated_calls`); {untested} rows have "
        f"none. Each operator also has an allowed call, and {at_edges} more are at the edges of "
        "rows (`edge_calls`: each dtype of a row, its smallest and largest sizes and numbers). All "
        "must pass, except those that another row of the operator allows only in other modes "
        f"(`ELSEWHERE` of `test_constraints.py`); {bare} rows have neither kind of call. Rows with "
        "a condition, or with a rule of their own kind, are tested only by calls written by hand. "
        f"Of the {len(launched)} operators that `vllm-davinci-kernels` launches, "
        f"{len(launched & rows_of.keys())} have rows; a test fails, naming the place of the call, "
        "if serving calls an operator without rows. Reasons, and how to set chip and release: "
        "[decisions/0010](../decisions/0010-a-strict-virtual-npu.md).\n" + body
    )


def _written(row: Any, operators: list[str]) -> int:
    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    return sum(
        f"aclnn{case.operator}" in operators
        and plain(case.argument) == plain(row.argument)
        and case.rule in row.rule
        and case.code == row.status
        for case in CASES
    )


def _is_broken(row: Any, operators: list[str]) -> bool:
    return any(breaking(row, LEGAL[name.removeprefix("aclnn")]) for name in operators)


def _at_edges(row: Any, operators: list[str]) -> int:
    if place_of(row)[0] == A310P:  # legal calls differ between these operators
        return 0
    legal = [LEGAL[name.removeprefix("aclnn")] for name in operators]
    return sum(bool(edge.calls) for call in legal for edge in edges(row, call))
