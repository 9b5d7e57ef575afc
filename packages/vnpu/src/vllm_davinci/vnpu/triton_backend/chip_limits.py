"""Finds limits of Triton-Ascend's compiler that a kernel exceeds, as far as they are known without
that compiler.

Sources: Triton-Ascend's migration guide (its errors "coreDim=... can't be greater than UINT16_MAX"
and "ub overflow, requires ... bits while 1572864 bits available") and its table of operations by
element type, for Atlas A2 and A3. Alignment only costs time there, and is not checked.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from vllm_davinci.vnpu.environment_variables import VNPU_TRITON_LIMITS
from vllm_davinci.vnpu.triton_backend.ttir import Block, Module, Operation, Type, Value

MAX_PROGRAMS = 65535
UNIFIED_BUFFER_BITS = 192 * 1024 * 8  # of a vector core
PRODUCT_TYPES = ("i8", "f16", "bf16", "f32")
# Operations without an equivalent on the chip.
ABSENT = {
    "tt.dot_scaled": "products with scales",
    "tt.elementwise_inline_asm": "assembly of another processor",
    "ttg.barrier": "barriers within a program",
    "gpu.barrier": "barriers within a program",
}
BITS = {"i1": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32}
RECORD = "record:"


@dataclass(frozen=True)
class Finding:
    """A limit that a kernel exceeds.

    place:   FILE:LINE, or "launch"
    is_sure: False if it depends on how the compiler reuses on-chip memory
    """

    kernel: str
    place: str
    what: str
    is_sure: bool = True

    def __str__(self) -> str:
        return f"Triton kernel {self.kernel}, {self.place}: {self.what}"


def mode() -> str:
    """The value of VNPU_TRITON_LIMITS: nothing, "raise" or "record:DIRECTORY"."""
    return os.environ.get(VNPU_TRITON_LIMITS, "")


def check_kernel(module: Module, text: str) -> None:
    """Raises NotImplementedError for the first sure finding, or records all with the kernel's TTIR.

    Does nothing unless VNPU_TRITON_LIMITS is set.
    """
    if not mode():
        return
    found = list(findings(module))
    if mode().startswith(RECORD):
        name = f"{module.kernel.name}.{hashlib.sha256(text.encode()).hexdigest()[:12]}.ttir"
        (Path(mode().removeprefix(RECORD)) / name).write_text(text, encoding="utf-8")
        _record(found)
    elif sure := [each for each in found if each.is_sure]:
        _refuse(sure[0])


def check_grid(kernel: str, grid: Sequence[int]) -> None:
    """Checks the size of a launch's grid, as `check_kernel` checks a kernel."""
    programs = grid[0] * grid[1] * grid[2]
    if not mode() or programs <= MAX_PROGRAMS:
        return
    if os.environ.get("TRITON_ALL_BLOCKS_PARALLEL") == "1":
        return
    finding = Finding(
        kernel,
        "launch",
        f"a grid of {programs} programs; a chip starts at most {MAX_PROGRAMS}. Use larger blocks, "
        "loop in the kernel, or set TRITON_ALL_BLOCKS_PARALLEL=1.",
    )
    if mode().startswith(RECORD):
        _record([finding])
    else:
        _refuse(finding)


def _record(found: Sequence[Finding]) -> None:
    with (Path(mode().removeprefix(RECORD)) / "findings.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(each)) + "\n" for each in found)


def _refuse(finding: Finding) -> NoReturn:
    raise NotImplementedError(f"{finding} Without --triton-limits it runs on virtual NPUs.")


def findings(module: Module) -> Iterator[Finding]:
    """Each limit that a kernel exceeds, once per line."""
    name = module.kernel.name
    seen = set()
    for function in module.functions.values():
        for operation in _operations(function.blocks):
            if (what := _refused(operation)) and (operation.place, what) not in seen:
                seen.add((operation.place, what))
                yield Finding(name, operation.place, what)
        bits, place = _peak(function.blocks)
        largest = max(
            (_bits(v.type) for o in _operations(function.blocks) for v in o.results), default=0
        )
        if largest <= UNIFIED_BUFFER_BITS < bits:
            yield Finding(
                name,
                place,
                f"tensors of {bits} bits are in use at once, and a vector core has "
                f"{UNIFIED_BUFFER_BITS}: it depends on the compiler's reuse. Use smaller blocks.",
                is_sure=False,
            )


def _operations(blocks: Sequence[Block]) -> Iterator[Operation]:
    for block in blocks:
        for operation in block.operations:
            yield operation
            for region in operation.regions:
                yield from _operations(region)


def _refused(operation: Operation) -> str | None:
    """Why a chip's compiler refuses an operation; None if nothing is known against it."""
    if operation.name in ABSENT:
        return f"{operation.name}: a chip has no {ABSENT[operation.name]}."
    values = [*operation.operands, *operation.results]
    if any(each.type.element == "f64" for each in values):
        return f"{operation.name} in float64, which a chip does not compute. Use float32."
    if operation.name == "tt.dot":
        types = {each.type.element for each in operation.operands[:2]}
        if types - {*PRODUCT_TYPES}:
            return f"tt.dot of {', '.join(sorted(types))}; a chip takes {', '.join(PRODUCT_TYPES)}."
        return None  # its accumulator has a memory of its own
    bits = max((_bits(each.type) for each in operation.results), default=0)
    if bits > UNIFIED_BUFFER_BITS:
        return (
            f"ub overflow: a tensor of {bits} bits, and a vector core has {UNIFIED_BUFFER_BITS}. "
            "Use smaller blocks."
        )
    return None


def _bits(kind: Type) -> int:
    """Bits of a tensor in on-chip memory. Addresses are computed, scalars are in registers."""
    return kind.count * BITS.get(kind.element, 0) if kind.shape else 0


def _peak(blocks: Sequence[Block]) -> tuple[int, str]:
    """The largest total of bits of tensors in use at once, and the line where it occurs."""
    most, where = 0, "?"
    for block in blocks:
        last: dict[Value, int] = {}
        for number, operation in enumerate(block.operations):
            inside = [o for region in operation.regions for o in _operations(region)]
            for value in (v for each in (operation, *inside) for v in each.operands):
                last[value] = number
        live: dict[Value, int] = {}
        for number, operation in enumerate(block.operations):
            live |= {value: _bits(value.type) for value in operation.results if value in last}
            inner, place = max(
                (_peak(region) for region in operation.regions), default=(0, operation.place)
            )
            total = sum(live.values()) + inner
            if total > most:
                most, where = total, place if inner else operation.place
            live = {value: bits for value, bits in live.items() if last[value] > number}
    return most, where
