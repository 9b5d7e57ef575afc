"""Prints the first phases' answers to `illegal_calls` on this process's devices.

The output is JSON: answers to legal calls by operator or name, to cases by number, and by rule to
calls generated from it, up to the first answer that names the rule. The argument AT_EDGES adds,
under this key, the answers to calls at each rule's edges.
"""

import json
import math
import os
import sys
from functools import cache
from typing import Any

import torch

from vllm_davinci.vnpu.operator_rows import constraints
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.edge_calls import answers_at_edges
from vllm_davinci_testing.operators.generated_calls import answers_to_breaking, key_of, place_of
from vllm_davinci_testing.operators.illegal_calls import ALSO_LEGAL, CASES
from vllm_davinci_testing.operators.legal_calls import A310P, LEGAL, Operand

AT_EDGES = "at edges"
_AFTER_ALL_RULES = "takes part in no group 'none'"


@cache
def tensor_of(operand: Operand) -> torch.Tensor:
    dtype = getattr(torch, operand.dtype)
    if operand.apart:
        *outer, last = operand.sizes
        # Rows with a gap; a vector with gaps between its entries.
        wide = torch.empty(*outer, 2 * last, dtype=dtype, device="npu")
        return wide[..., ::2] if not outer else wide[..., :last]
    if operand.by_columns:
        return torch.empty(operand.sizes[::-1], dtype=dtype, device="npu").T
    if operand.is_tiled:  # partial tiles take more memory
        memory = torch.empty(2 * math.prod(operand.sizes) + 4096, dtype=dtype, device="npu")
        return memory[: math.prod(operand.sizes)].view(operand.sizes)
    return torch.empty(operand.sizes, dtype=dtype, device="npu")


def argument_of(value: Any) -> aclnn.Argument:
    if isinstance(value, Operand):
        tensor = tensor_of(value)
        return aclnn.Tiled(tensor) if value.is_tiled else tensor
    if isinstance(value, list):
        return [argument_of(each) for each in value]
    return value


def answer(operator: str, arguments: dict[str, Any]) -> str:
    """Returns the refusal, or the bytes of workspace."""
    try:
        return str(aclnn.workspace_size(operator, *map(argument_of, arguments.values())))
    except RuntimeError as error:
        return "0" if _AFTER_ALL_RULES in str(error) else str(error)


def answers() -> dict[str, Any]:
    torch.npu.set_device(0)
    found: dict[str, Any] = {AT_EDGES: {}}
    if (soc := os.environ["VNPU_SOC"]) == "Ascend910B3" and os.environ["VNPU_CANN"] == "8.5":
        found |= {operator: answer(operator, legal) for operator, legal in LEGAL.items()}
        found |= {name: answer(name.split()[0], legal) for name, legal in ALSO_LEGAL.items()}
    for number, case in enumerate(CASES):
        if (case.soc, case.cann) == (soc, os.environ["VNPU_CANN"]):
            found[str(number)] = answer(case.operator, {**LEGAL[case.operator], **case.changes})
    for row in constraints():
        operator = row.operator.removeprefix("aclnn")
        if operator in LEGAL and place_of(row) == (soc, os.environ["VNPU_CANN"]):
            found[key_of(row)] = answers_to_breaking(row, LEGAL[operator], answer)
            if AT_EDGES in sys.argv and soc != A310P:  # it has other legal calls
                found[AT_EDGES][key_of(row)] = answers_at_edges(row, LEGAL[operator], answer)
    return found


if __name__ == "__main__":
    json.dump(answers(), sys.stdout)
