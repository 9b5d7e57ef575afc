"""Writes the calls that `vllm-davinci verify` tries on a chip, with the expected answers.

The calls are those of the virtual NPU's tests, generated or written by hand: legal, at the edge of
a rule, or breaking a rule. They are stored as data, because a machine with a chip has no virtual
NPU. The expected answers are the virtual NPU's; each chip and CANN release runs in a process of its
own. Run by `nox -s docs`.
"""

import ctypes
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "packages/verify/src/vllm_davinci/verify/calls.json.xz"
PLACES = [
    (soc, cann) for soc in ("Ascend910B3", "Ascend910_9391") for cann in ("8.3", "8.5", "9.0")
]
PLACE_NAMES = {"Ascend910B3": "A2", "Ascend910_9391": "A3"}
LIMIT_S = 600.0
TOO_LARGE = "507015"
"""Status for operands outside allocated memory, which says nothing about the call."""


def written(value: Any) -> Any:
    """Converts a call's argument to JSON."""
    from vllm_davinci_testing.operators.aclnn import Number, Numbers
    from vllm_davinci_testing.operators.legal_calls import Operand

    match value:
        case Operand():
            ways = {"apart": value.apart, "tiled": value.is_tiled, "by_columns": value.by_columns}
            lies = next((way for way, is_so in ways.items() if is_so), None)
            said = {"sizes": list(value.sizes), "dtype": value.dtype}
            return said if lies is None else {**said, "lies": lies}
        case list():
            return {"tensors": [written(each) for each in value]}
        case Number():
            return {"scalar": float(value), "dtype": str(value.dtype).removeprefix("torch.")}
        case Numbers(values):
            return {"scalars": list(values)}
        case tuple():
            return {"ints": list(value)}
        case ctypes.c_int8():
            return {"int8": value.value}
        case ctypes.c_int32():
            return {"int32": value.value}
        case ctypes.c_float():
            return {"float32": value.value}
    return value


def asks_a_group(arguments: Mapping[str, Any]) -> bool:
    """True if a call needs a group of ranks, which the operator looks up in its first phase."""
    return "group" in arguments


Found = tuple[str, str, Mapping[str, Any]]  # operator, question, changes to the legal call


def chosen() -> Iterator[Found]:
    """Yields the calls that get their intended answer on this process's chip and CANN release."""
    from vllm_davinci.vnpu.operator_rows import constraints
    from vllm_davinci_testing.operators import (
        edge_calls,
        generated_calls,
        illegal_calls,
        legal_calls,
    )
    from vllm_davinci_testing.operators.first_phase import answer

    place = os.environ["VNPU_SOC"], os.environ["VNPU_CANN"]
    legal = {
        operator: arguments
        for operator, arguments in legal_calls.LEGAL.items()
        if not asks_a_group(arguments)
    }
    if place == PLACES[1]:
        yield from ((operator, "a legal call", {}) for operator in legal)
        for name, arguments in illegal_calls.ALSO_LEGAL.items():
            operator, _, way = name.partition(" ")
            own = legal[operator]
            changes = {key: each for key, each in arguments.items() if each is not own[key]}
            yield operator, f"a legal call {way}", changes
    for case in illegal_calls.CASES:
        if (case.soc, case.cann) == place and case.operator in legal:
            yield case.operator, f"{case.argument}: {case.rule}", case.changes
    for row in constraints():
        operator = row.operator.removeprefix("aclnn")
        if operator not in legal or generated_calls.place_of(row) != place:
            continue
        for changes in generated_calls.breaking(row, legal[operator]):
            if generated_calls.names(row, answer(operator, {**legal[operator], **changes})):
                yield operator, f"{row.argument} must {row.rule}", changes
                break
        for edge in edge_calls.edges(row, legal[operator]):
            for changes in edge.calls:
                if answer(operator, {**legal[operator], **changes}).isdigit():
                    yield operator, f"{row.argument} at its edge: {edge.value}", changes
                    break


def in_place(place: tuple[str, str], task: str, given: str = "") -> Any:
    """Runs this program in another process, with the given chip and CANN release."""
    soc, cann = place
    command = ["vnpu", "run", "--soc", soc, "--cann", cann, "--", sys.executable, __file__, task]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def calls_file() -> str:
    """Formats the file, one call per line."""
    legal: dict[str, Any] = {}
    calls: dict[str, dict[str, Any]] = {}
    for place in PLACES:
        found = in_place(place, "choose")
        legal |= found["legal"]
        for call in found["calls"]:
            same = json.dumps([call["operator"], call["changes"]])
            calls.setdefault(same, call)
    listed = list(calls.values())
    given = json.dumps({"legal": legal, "calls": listed})
    answers = {place: in_place(place, "answer", given) for place in PLACES}
    for number, call in enumerate(listed):
        said = {f"{PLACE_NAMES[soc]} {cann}": answers[soc, cann][number] for soc, cann in PLACES}
        alike = set(said.values())
        call["expected"] = alike.pop() if len(alike) == 1 else said
    asked = [call for call in listed if TOO_LARGE not in str(call["expected"])]
    lines = ",\n".join(json.dumps(call) for call in _numbered(asked))
    operators = ",\n".join(f"{json.dumps(name)}: {json.dumps(legal[name])}" for name in legal)
    return f'{{"legal": {{\n{operators}\n}},\n"calls": [\n{lines}\n]}}\n'


def _numbered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives each call a unique name."""
    seen: dict[str, int] = {}
    for call in calls:
        name = f"{call['operator']}: {call['asks']}"
        seen[name] = seen.get(name, 0) + 1
        call["asks"] += f" ({seen[name]})" if seen[name] > 1 else ""
    return calls


def _choose() -> dict[str, Any]:
    from torch_npu import npu

    from vllm_davinci_testing.operators.legal_calls import LEGAL

    npu.set_device(0)
    legal = {
        operator: {name: written(value) for name, value in arguments.items()}
        for operator, arguments in LEGAL.items()
        if not asks_a_group(arguments)
    }
    calls = [
        {
            "operator": operator,
            "asks": asks,
            "changes": {name: written(value) for name, value in changes.items()},
        }
        for operator, asks, changes in chosen()
    ]
    return {"legal": legal, "calls": calls}


def _answer(given: dict[str, Any]) -> list[str]:
    import torch
    from torch_npu import npu

    from vllm_davinci.verify.first_phase import FirstPhase
    from vllm_davinci.verify.parts_of.constraints import MEMORY_BYTES

    npu.set_device(0)
    memory = torch.empty(MEMORY_BYTES, dtype=torch.uint8, device="npu")
    phase = FirstPhase(memory.data_ptr())
    return [
        phase.answer(call["operator"], {**given["legal"][call["operator"]], **call["changes"]})[0]
        for call in given["calls"]
    ]


if __name__ == "__main__":
    task = sys.argv[1] if len(sys.argv) > 1 else ""
    if task == "choose":
        print(json.dumps(_choose()))
    elif task == "answer":
        print(json.dumps(_answer(json.load(sys.stdin))))
    else:
        CALLS.write_bytes(lzma.compress(calls_file().encode(), preset=9))
