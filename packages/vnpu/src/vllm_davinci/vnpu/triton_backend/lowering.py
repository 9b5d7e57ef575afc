"""Lowers a parsed kernel to the instructions that vnpu's C++ executes (csrc/triton).

An instruction is an operation of Triton's with numbers instead of names. The lowering also
determines a kernel's cost, and the parameter from which each address comes.
"""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NoReturn

from vllm_davinci.vnpu.triton_backend.instructions import Instruction, LoweredBlock, used_by
from vllm_davinci.vnpu.triton_backend.ttir import (
    Block,
    Function,
    Module,
    Operation,
    Type,
    UnsupportedOperationError,
    Value,
    parse_type,
)

TYPES = {
    "i1": 0,
    "i8": 1,
    "i16": 2,
    "i32": 3,
    "i64": 4,
    "f16": 5,
    "bf16": 6,
    "f32": 7,
    "f64": 8,
    "ptr": 9,
    "f8E4M3FN": 10,
    "f8E5M2": 11,
}
BYTES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 1, 1)
ARITHMETIC = {"i8": 0, "f16": 1, "bf16": 2}  # timing::Arithmetic; others: 3, float32
INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
FLOAT_PREDICATES = (
    *("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"),
    *("ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"),
)
UPDATES = (*("", "and", "or", "xor", "add", "fadd", "max", "min", "umax", "umin", "exch"),)
ENDS = {*("tt.return", "scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return")}
COPIES = {
    *("tt.expand_dims", "tt.reshape", "tt.bitcast", "arith.bitcast", "tt.unsplat"),
    *("tt.int_to_ptr", "tt.ptr_to_int"),
}
SAME = {
    "arith.extf": "convert_float",
    "arith.truncf": "convert_float",
    "tt.precise_divf": "arith.divf",
    "tt.precise_sqrt": "math.sqrt",
}
# Hints, and barriers among threads of a program, which is one thread here.
NOTHING = {
    *("ttg.barrier", "gpu.barrier", "llvm.intr.assume", "ttng.fence_async_shared"),
    *("tt.grid_dependency_wait", "tt.grid_dependency_launch_dependents"),
}
# Functions of CUDA's library, without the prefix __nv_ and the f of float32.
_UNARY = ("exp", "exp2", "log", "log2", "sin", "cos", "tanh", "erf", "expm1", "log1p", "sqrt")
LIBRARY = (
    {each: f"math.{each}" for each in (*_UNARY, "rsqrt", "atan2", "fma", "floor", "ceil")}
    | {each: f"math.{each}" for each in ("round", "trunc")}
    | dict.fromkeys(("rint", "nearbyint"), "math.roundeven")
    | dict.fromkeys(("div_rn", "fdivide", "fast_fdivide"), "arith.divf")
    | {f"fast_{each}": f"math.{each}" for each in ("exp", "log", "log2", "sin", "cos", "tanh")}
    | {"pow": "math.powf", "fabs": "math.absf", "fmod": "arith.remf"}
    | {"fmax": "arith.maxnumf", "fmin": "arith.minnumf"}
    | dict.fromkeys(("finite", "isfinited"), "is_finite")
    | {"isnan": "is_nan", "isinf": "is_inf"}
)


@dataclass
class Cost:
    """Work of one program, with each loop's body once."""

    operations: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    has_loops: bool = False
    products: list[tuple[int, int, int, int, int]] = field(default_factory=list)


@cache
def element_wise() -> frozenset[str]:
    """Operations whose result's elements each depend only on the same elements of the operands."""
    from vllm_davinci.vnpu import _C

    names = _C.triton_operations()
    return frozenset(names[: names.index("")])


def attribute(text: str, name: str) -> str:
    """Value of `name = value` among an operation's attributes; empty without one."""
    found = re.search(rf"\b{name} = ([^,}}>:]+)", text)
    return found[1].strip() if found else ""


def integer(text: str, name: str) -> int:
    return int(attribute(text, name) or 0)


class Lowering:
    """Values and instructions of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.types: list[Type] = []
        self.numbers: dict[Value, int] = {}
        self.constants: dict[int, int] = {}
        self.cost = Cost()
        # Where the addresses in a value come from: edges to other values, and parameters (-1:
        # memory).
        self.flows: list[tuple[int, int]] = []
        self.roots: dict[int, set[int]] = {}
        self.accesses: list[tuple[Instruction, bool, bool]] = []
        self.function_numbers = {
            name: number
            for number, name in enumerate(
                sorted(module.functions, key=lambda each: each != module.kernel.name)
            )
        }
        self.returned: dict[str, list[int]] = {}
        self.functions = [self.function(module.functions[each]) for each in self.function_numbers]

    # --- values ---------------------------------------------------------------------------------

    def number(self, of: Type) -> int:
        self.types.append(of)
        return len(self.types) - 1

    def of(self, value: Value) -> int:
        return self.numbers[value]

    def define(self, value: Value) -> int:
        self.numbers[value] = number = self.number(value.type)
        return number

    def all_of(self, values: Sequence[Value]) -> list[int]:
        return [self.of(each) for each in values]

    def flow(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.flows += [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if self.types[target].element == "ptr"
        ]

    def refuse(self, operation: Operation, what: str = "") -> NoReturn:
        raise UnsupportedOperationError(
            f"Triton kernel {self.module.kernel.name}, {operation.place}: "
            f"{operation.name}{what and f' ({what})'}, which virtual NPUs do not execute."
        )

    # --- functions and regions ------------------------------------------------------------------

    def function(self, function: Function) -> tuple[list[int], list[LoweredBlock]]:
        arguments = [
            self.numbers[value] if value in self.numbers else self.define(value)
            for _, value in function.parameters
        ]
        if function is self.module.kernel:
            for place, number in enumerate(arguments):
                self.roots[number] = {place}
        return arguments, self.region(function.blocks)

    def region(self, blocks: list[Block]) -> list[LoweredBlock]:
        places = {block.label: place for place, block in enumerate(blocks)}
        for block in blocks:
            for value in block.arguments:
                if value not in self.numbers:
                    self.define(value)
        targets = [self.all_of(block.arguments) for block in blocks]
        lowered = []
        for block, arguments in zip(blocks, targets, strict=True):
            body: list[Instruction] = []
            for operation in block.operations:
                if operation.name in {"cf.br", "cf.cond_br"}:
                    body.append(self.branch(operation, places, targets))
                else:
                    body += self.operation(operation)
            if not body or body[-1].name not in {"end", "cf.br", "cf.cond_br"}:
                body.append(Instruction("end", "?"))
            lowered.append(LoweredBlock(arguments, body))
        return lowered

    def branch(
        self, operation: Operation, places: dict[str, int], targets: list[list[int]]
    ) -> Instruction:
        operands = self.all_of(operation.operands)
        lowered = Instruction(operation.name, operation.place, operands=operands)
        given = operands[1:] if operation.name == "cf.cond_br" else operands
        for label in re.findall(r"\^(\w+)", operation.text):
            place = places[label]
            count = len(targets[place])
            self.flow(given[:count], targets[place])
            given = given[count:]
            lowered.attributes += [place, count]
        return lowered

    # --- operations -----------------------------------------------------------------------------

    def operation(self, operation: Operation) -> list[Instruction]:
        """The instructions for an operation, usually one."""
        name = operation.name
        for value in (*operation.operands, *operation.results):
            if value.type.element not in TYPES:
                self.refuse(operation, f"elements of type {value.type.element}")
        if name in NOTHING:
            return []
        if name in {"arith.constant", "ub.poison"}:
            self.constant(operation)
            return []
        if name in ENDS:
            return [Instruction("end", operation.place, operands=self.all_of(operation.operands))]
        lower: Callable[[Operation], list[Instruction]] | None = getattr(
            self, name.replace(".", "_"), None
        )
        if lower is not None:
            return lower(operation)
        if name in COPIES:
            return [self.simple(operation, "copy")]
        name = SAME.get(name, name)
        if name not in element_wise():
            self.refuse(operation)
        return [self.simple(operation, name)]

    def simple(
        self, operation: Operation, name: str = "", attributes: Sequence[int] = ()
    ) -> Instruction:
        """An instruction with the operation's operands and results."""
        operands = self.all_of(operation.operands)
        results = [self.define(each) for each in operation.results]
        for result in results:
            if operation.name == "tt.int_to_ptr":
                self.roots[result] = {-1}
            pointers = [each for each in operands if self.types[each].element == "ptr"]
            self.flow(pointers, [result] * len(pointers))
        if results and name != "copy":
            self.cost.operations += operation.results[0].type.count
        name = name or operation.name
        return Instruction(name, operation.place, results, operands, list(attributes))

    def constant(self, operation: Operation) -> None:
        of = operation.results[0].type
        text = operation.text.split(" : ")[0].strip()
        if match := re.match(r"dense<(.*)>$", text):
            text = match[1]
        if operation.name == "ub.poison":
            text = "0"
        if text.startswith("["):
            self.refuse(operation, "a list of constants")
        self.constants[self.define(operation.results[0])] = bits_of(text, of.element)

    def arith_cmpi(self, operation: Operation) -> list[Instruction]:
        predicate = INT_PREDICATES.index(operation.text.split(",")[0])
        return [self.simple(operation, attributes=[predicate])]

    def arith_cmpf(self, operation: Operation) -> list[Instruction]:
        predicate = FLOAT_PREDICATES.index(operation.text.split(",")[0])
        return [self.simple(operation, attributes=[predicate])]

    def arith_select(self, operation: Operation) -> list[Instruction]:
        condition, result = operation.operands[0], operation.results[0].type
        if condition.type.shape == result.shape:
            return [self.simple(operation)]
        spread = self.number(Type("i1", result.shape))
        first = Instruction("tt.splat", operation.place, [spread], [self.of(condition)])
        select = self.simple(operation)
        select.operands[0] = spread
        return [first, select]

    def arith_index_cast(self, operation: Operation) -> list[Instruction]:
        widths = [
            BYTES[TYPES[each.type.element]] for each in (*operation.operands, *operation.results)
        ]
        name = "arith.trunci" if widths[0] > widths[1] else "arith.extsi"
        return [self.simple(operation, name if widths[0] != widths[1] else "copy")]

    def tt_addptr(self, operation: Operation) -> list[Instruction]:
        pointee = parse_type(operation.results[0].type.pointee)
        return [self.simple(operation, attributes=[BYTES[TYPES[pointee.element]]])]

    def tt_fp_to_fp(self, operation: Operation) -> list[Instruction]:
        if "rounding = rtz" in operation.text:
            self.refuse(operation, "rounding toward zero")
        return [self.simple(operation, "convert_float")]

    def tt_clampf(self, operation: Operation) -> list[Instruction]:
        return [self.simple(operation, attributes=[int("propagateNan = all" in operation.text)])]

    def tt_extern_elementwise(self, operation: Operation) -> list[Instruction]:
        symbol = attribute(operation.text, "symbol").strip('"')
        function = symbol.removeprefix("__nv_")
        name = LIBRARY.get(function) or LIBRARY.get(function.removesuffix("f"))
        if name is None or not symbol.startswith("__nv_"):
            self.refuse(operation, f"the library function {symbol}")
        return [self.simple(operation, name)]

    def tt_splat(self, operation: Operation) -> list[Instruction]:
        if (bits := self.constants.get(self.of(operation.operands[0]))) is not None:
            self.constants[self.define(operation.results[0])] = bits
            return []
        return [self.simple(operation)]

    tt_broadcast = tt_join = tt_split = tt_cat = tt_histogram = lambda self, operation: [
        self.simple(operation)
    ]

    def tt_trans(self, operation: Operation) -> list[Instruction]:
        order = re.search(r"array<i32: ([\d, ]+)>", operation.text)
        assert order is not None, operation.text
        return [self.simple(operation, attributes=[int(each) for each in order[1].split(",")])]

    def tt_make_range(self, operation: Operation) -> list[Instruction]:
        return [self.simple(operation, attributes=[integer(operation.text, "start")])]

    def tt_gather(self, operation: Operation) -> list[Instruction]:
        axis = re.search(r"axis = (\d+)", operation.text)
        assert axis is not None, operation.text
        return [self.simple(operation, attributes=[int(axis[1])])]

    def tt_get_program_id(self, operation: Operation) -> list[Instruction]:
        return [self.simple(operation, attributes=["xyz".index(operation.text[0])])]

    tt_get_num_programs = tt_get_program_id

    def tt_assert(self, operation: Operation) -> list[Instruction]:
        lowered = self.simple(operation)
        found = re.search(r'"([^"]*)"', operation.text)
        lowered.text = found[1] if found else ""
        return [lowered]

    tt_print = tt_assert

    def tt_dot(self, operation: Operation) -> list[Instruction]:
        left, result = operation.operands[0].type, operation.results[0].type
        *batch, m, n = result.shape
        k = left.shape[-1]
        count = 1
        for each in batch:
            count *= each
        self.cost.products.append((m, n, k, count, ARITHMETIC.get(left.element, 3)))
        return [self.simple(operation)]

    # --- memory ---------------------------------------------------------------------------------

    def access(
        self, operation: Operation, reads: bool, writes: bool, *more: int
    ) -> list[Instruction]:
        lowered = self.simple(operation, attributes=[-1, *more])
        self.accesses.append((lowered, reads, writes))
        of = (operation.results or operation.operands[1:])[0].type
        moved = of.count * BYTES[TYPES[of.element]]
        self.cost.loaded_bytes += moved * reads
        self.cost.stored_bytes += moved * writes
        return [lowered]

    def tt_load(self, operation: Operation) -> list[Instruction]:
        lowered = self.access(operation, True, False)
        if operation.results[0].type.element == "ptr":
            self.roots[self.of(operation.results[0])] = {-1}
            self.flows = [each for each in self.flows if each[1] != lowered[0].results[0]]
        return lowered

    def tt_store(self, operation: Operation) -> list[Instruction]:
        return self.access(operation, False, True)

    def tt_atomic_rmw(self, operation: Operation) -> list[Instruction]:
        return self.access(operation, True, True, UPDATES.index(operation.text.split(",")[0]))

    def tt_atomic_cas(self, operation: Operation) -> list[Instruction]:
        return self.access(operation, True, True)

    # --- control flow ---------------------------------------------------------------------------

    def tt_call(self, operation: Operation) -> list[Instruction]:
        found = re.match(r'@("[^"]+"|[\w.$]+)', operation.text)
        assert found is not None, operation.text
        function = self.module.functions[found[1].strip('"')]
        lowered = self.simple(operation)
        lowered.attributes = [self.function_numbers[function.name]]
        for _, value in function.parameters:
            if value not in self.numbers:
                self.define(value)
        self.flow(lowered.operands, self.all_of([value for _, value in function.parameters]))
        for result in lowered.results:
            if self.types[result].element == "ptr":
                self.roots[result] = {-1}
        return [lowered]

    def scf_if(self, operation: Operation) -> list[Instruction]:
        lowered = self.simple(operation)
        lowered.regions = [self.region(each) for each in operation.regions]
        if len(lowered.regions) == 1:
            lowered.regions.append([])
        for region in filter(None, lowered.regions):
            self.flow(region[-1].body[-1].operands, lowered.results)
        return [lowered]

    def scf_for(self, operation: Operation) -> list[Instruction]:
        if operation.text.startswith("unsigned "):
            self.refuse(operation, "an unsigned loop")
        self.cost.has_loops = True
        lowered = self.simple(operation)
        lowered.regions = [self.region(operation.regions[0])]
        carried = lowered.regions[0][0].arguments[1:]
        ends = lowered.regions[0][-1].body[-1].operands
        for sources in (lowered.operands[3:], ends):
            self.flow(sources, carried)
        self.flow(carried, lowered.results)
        return [lowered]

    def scf_while(self, operation: Operation) -> list[Instruction]:
        self.cost.has_loops = True
        lowered = self.simple(operation)
        lowered.regions = [self.region(each) for each in operation.regions]
        before, after = lowered.regions
        passed = before[-1].body[-1].operands[1:]
        self.flow(lowered.operands, before[0].arguments)
        self.flow(passed, after[0].arguments)
        self.flow(passed, lowered.results)
        self.flow(after[-1].body[-1].operands, before[0].arguments)
        return [lowered]

    # --- combinations ---------------------------------------------------------------------------

    def tt_reduce(self, operation: Operation) -> list[Instruction]:
        of, axis = operation.operands[0].type, integer(operation.text, "axis")
        if of.shape[axis] & (of.shape[axis] - 1):
            self.refuse(operation, f"an axis of {of.shape[axis]} elements, no power of two")
        return [self.combination(operation, [axis], max(1, of.count // 2))]

    def tt_scan(self, operation: Operation) -> list[Instruction]:
        of, axis = operation.operands[0].type, integer(operation.text, "axis")
        reverse = int(attribute(operation.text, "reverse") == "true")
        return [self.combination(operation, [axis, reverse], of.count // of.shape[axis])]

    def combination(self, operation: Operation, attributes: list[int], lanes: int) -> Instruction:
        """Lowers a reduction or scan. In its region a value is a tensor with a lane for each
        element that is combined at the same time.
        """
        (block,) = operation.regions[0]
        lowered = self.simple(operation, attributes=attributes)
        self.cost.operations += operation.operands[0].type.count * len(block.operations)
        within = Combination(self, lanes, operation)
        arguments = [within.define(each) for each in block.arguments]
        for each in block.operations[:-1]:
            within.operation(each)
        ends = [within.of(each) for each in block.operations[-1].operands]
        for place, number in enumerate(ends):  # each a value of its own, not an argument
            if number in arguments or number in self.constants or number in ends[:place]:
                ends[place] = self.number(self.types[number])
                within.body.append(Instruction("copy", operation.place, [ends[place]], [number]))
        within.body.append(Instruction("end", operation.place, operands=ends))
        lowered.regions = [[LoweredBlock(arguments, within.body)]]
        return lowered

    def synchronizes(self) -> bool:
        """True if a result of an atomic operation is used: programs may wait for each other."""
        returned = {each.results[0] for each, reads, writes in self.accesses if reads and writes}
        return any(
            returned & used_by(each)
            for _, blocks in self.functions
            for block in blocks
            for each in block.body
        )

    # --- after all ------------------------------------------------------------------------------

    def spread_roots(self) -> None:
        """Propagates to each value the parameters from which its addresses come."""
        changed = True
        while changed:
            changed = False
            for source, target in self.flows:
                missing = self.roots.get(source, set()) - self.roots.setdefault(target, set())
                changed = changed or bool(missing)
                self.roots[target] |= missing


class Combination:
    """Lowers the region of a reduction or scan: element-wise operations of scalars, as tensors."""

    def __init__(self, lowering: Lowering, lanes: int, of: Operation) -> None:
        self.lowering, self.lanes, self.outer = lowering, lanes, of
        self.numbers: dict[Value, int] = {}
        self.body: list[Instruction] = []

    def define(self, value: Value) -> int:
        """Defines a value of the region."""
        number = self.lowering.numbers[value] = self.spread(value)
        return number

    def spread(self, value: Value) -> int:
        of = Type(value.type.element, (self.lanes,), value.type.pointee)
        self.numbers[value] = number = self.lowering.number(of)
        return number

    def of(self, value: Value) -> int:
        if value in self.numbers:
            return self.numbers[value]
        outside = self.lowering.of(value)  # a scalar of the kernel
        number = self.spread(value)
        if outside in self.lowering.constants:
            self.lowering.constants[number] = self.lowering.constants[outside]
        else:
            self.body.append(Instruction("tt.splat", self.outer.place, [number], [outside]))
        return number

    def operation(self, operation: Operation) -> None:
        for value in operation.operands:
            self.of(value)
        lowered = self.lowering.operation(operation) if operation.regions == [] else []
        names = element_wise()
        if operation.name in {"arith.constant", "ub.poison"}:
            bits = self.lowering.constants[self.lowering.of(operation.results[0])]
            self.lowering.constants[self.define(operation.results[0])] = bits
            return
        if not lowered or any(each.name not in names for each in lowered):
            self.lowering.refuse(operation, "in the region of a reduction")
        (instruction,) = lowered
        instruction.operands = [self.of(each) for each in operation.operands]
        instruction.results = [self.define(each) for each in operation.results]
        self.body.append(instruction)


def bits_of(text: str, element: str) -> int:
    """Bits of a constant as Triton prints it: a number, `true`, or hexadecimal bits of a float."""
    if text in {"true", "false"}:
        return int(text == "true")
    if element.startswith("i") or element == "ptr":
        return int(text, 0) & (2**64 - 1)
    if text.startswith("0x"):
        return int(text, 16)
    value = float(text)
    if element == "f64":
        return int.from_bytes(struct.pack("<d", value), "little")
    if element == "f16":
        return int.from_bytes(struct.pack("<e", value), "little")
    if element == "f32":
        return int.from_bytes(struct.pack("<f", value), "little")
    if element == "bf16":  # the printed value is exact
        return int.from_bytes(struct.pack("<f", value), "little") >> 16
    if value == 0:
        return 0
    raise UnsupportedOperationError(f"the constant {text} of type {element}")
