"""A call of an operator, its definition, and the tolerance between their results."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
Results = Tensor | Sequence[Tensor | None]

npu: Any = torch.ops.npu  # registered by torch_npu

# Tolerance relative to a result's largest value: rounding once to the dtype, and another order of
# sums. fp32: a cube core may compute products with 10 bits of mantissa (HF32).
BOUNDS = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
# Tolerance of integers rounded from floats: the difference, and the fraction that differs.
MOST_STEPS = 1
STEPS_SHARE = 0.02


@dataclass(frozen=True)
class OperatorCall:
    """
    operator: name in torch
    launches: CANN's operators, without aclnn
    variant:  distinguishes the operator's calls: "16 tokens, bfloat16"
    operands: arguments by name: values, or functions from a generator to a CPU tensor
    call:     runs on the device; definition: runs on the CPU with the same arguments
    exact:    True: results must be equal bit by bit, as values are only moved, chosen or counted
    """

    operator: str
    launches: str
    variant: str
    operands: Mapping[str, Any]
    call: Callable[..., Results]
    definition: Callable[..., Results]
    exact: bool = False

    def make(self, generator: torch.Generator) -> dict[str, Any]:
        """Creates the arguments from a generator."""
        return {
            name: each(generator) if callable(each) else each
            for name, each in self.operands.items()
        }


@dataclass(frozen=True)
class Outcome:
    """
    error: the largest error, in the unit of `bound`
    wrong: another mistake: a shape, a dtype, a NaN; "" if there is none
    worst: place of the error: result, index, value, expected value
    """

    error: float
    bound: float
    wrong: str
    worst: dict[str, Any]


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator that gives the same operands for a name and seed on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)


def on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("npu")
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [each.to("npu") for each in value]
    return value


def described(arguments: Arguments) -> dict[str, str]:
    """Describes arguments for a report: "bfloat16[16, 4096]", or the value."""

    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return str([one(each) for each in value])
        return repr(value)

    return {name: one(value) for name, value in arguments.items()}


def compare(results: Results, expected: Results, exact: bool) -> Outcome:
    """Compares the device's results with the definition's; the worst of several counts."""
    worst = Outcome(0.0, 0.0, "", {})
    pairs = zip(_listed(results), _listed(expected), strict=True)
    for number, (one, other) in enumerate(pairs):
        if other is None:
            continue
        found = _compared(one, other, exact, number)
        if found.wrong or (found.error, found.bound) > (worst.error, worst.bound):
            worst = found
        if found.wrong:
            break
    return worst


def _listed(results: Results) -> list[Tensor | None]:
    return [results] if isinstance(results, Tensor) else list(results)


def _compared(result: Tensor | None, expected: Tensor, exact: bool, number: int) -> Outcome:
    if result is None:
        return Outcome(0.0, 0.0, f"result {number} is missing", {})
    got = result.cpu()
    if got.shape != expected.shape:
        sizes = f"{list(got.shape)}, expected {list(expected.shape)}"
        return Outcome(0.0, 0.0, f"result {number} has sizes {sizes}", {})
    if got.dtype != expected.dtype:
        return Outcome(0.0, 0.0, f"result {number} is {got.dtype}, expected {expected.dtype}", {})
    if not expected.numel():
        return Outcome(0.0, 0.0, "", {})
    wide, wanted = got.double(), expected.double()
    same_infinities = wide.isfinite() == wanted.isfinite()
    distance = (wide - wanted).abs().nan_to_num(0.0)
    distance = distance.masked_fill(~same_infinities, float("inf"))
    at = int(distance.argmax())
    worst: dict[str, Any] = {
        "result": number,
        "index": [int(each) for each in torch.unravel_index(torch.tensor(at), expected.shape)],
        "value": float(wide.flatten()[at]),
        "expected": float(wanted.flatten()[at]),
        "differing": int((distance > 0).sum()),
        "of": expected.numel(),
    }
    if exact:
        return Outcome(float(distance.max()), 0.0, "", worst)
    if not expected.dtype.is_floating_point:
        share = worst["differing"] / expected.numel()
        wrong = "" if share <= STEPS_SHARE else f"{share:.1%} of result {number} differ"
        return Outcome(float(distance.max()), MOST_STEPS, wrong, worst)
    largest = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
    return Outcome(float(distance.max()) / largest, BOUNDS[expected.dtype], "", worst)
