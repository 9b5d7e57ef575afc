"""Parses the text of Triton's intermediate representation (TTIR).

Triton's Python bindings of MLIR give no general access to attributes, so the text is the interface:
one operation per line, regions in braces, locations at the end. Names of values are unique only
within a region; each value becomes an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

NAME = re.compile(r"%[\w$.-]+")
OPERAND = re.compile(r"%[\w$.-]+(?:#\d+)?")
RESULTS = re.compile(r"^(%[\w$.-]+(?::\d+)?(?:, %[\w$.-]+(?::\d+)?)*) = ")
LOCATION = re.compile(r"^#(loc\d*) = loc\((.*)\)$")
FILE = re.compile(r'"([^"]+)":(\d+)')
REFERENCE = re.compile(r"#(loc\d*)")
TENSOR = re.compile(r"^tensor<((?:\d+x)*)(.*)>$")
BLOCK = re.compile(r"^\^(\w+)(?:\((.*)\))?:")
OPERATION = re.compile(r'"?([\w.$]+)"? ?')
FUNCTION = re.compile(r"^tt\.func (public|private) @(\"[^\"]+\"|[\w.$]+)(?=\()")


class UnsupportedOperationError(NotImplementedError):
    """A kernel uses something that virtual NPUs do not execute."""


@dataclass(frozen=True)
class Type:
    """Element type (`i32`, `bf16`, `ptr`, ...) and shape; a scalar has the shape ()."""

    element: str
    shape: tuple[int, ...] = ()
    pointee: str = ""

    @property
    def count(self) -> int:
        count = 1
        for each in self.shape:
            count *= each
        return count


@dataclass(eq=False)
class Value:
    type: Type


@dataclass
class Block:
    label: str
    arguments: list[Value]
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Operation:
    """name, operands and results; `text` is everything else but the location."""

    name: str
    text: str
    operands: list[Value]
    results: list[Value]
    place: str = "?"
    regions: list[list[Block]] = field(default_factory=list)


@dataclass
class Function:
    name: str
    parameters: list[tuple[str, Value]]
    blocks: list[Block]


@dataclass
class Module:
    kernel: Function
    functions: dict[str, Function]


def parse_type(text: str) -> Type:
    """Parses a type. Raises UnsupportedOperationError for types without a meaning here, such as
    descriptors.
    """
    text = text.strip()
    if match := TENSOR.match(text):
        inner = parse_type(match[2].split(", #")[0])
        shape = tuple(int(each) for each in match[1].split("x") if each)
        return Type(inner.element, shape, inner.pointee)
    if text.startswith("!tt.ptr<"):
        pointee = split_list(text[len("!tt.ptr<") : -1])[0]
        if pointee.startswith("tensor<"):
            raise UnsupportedOperationError(f"the block pointer {text}")
        return Type("ptr", (), pointee)
    if re.fullmatch(r"i\d+|f\d+(E\dM\d(FN)?)?|bf16|index", text):
        return Type("i64" if text == "index" else text)
    raise UnsupportedOperationError(f"the type {text}")


def split_list(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for place, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "<({[":
            depth += 1
        elif character in ">)}]" and not (character == ">" and text[place - 1] == "-"):
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def bracketed(text: str, start: int) -> str:
    """Text within the bracket that opens at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return text[start + 1 : place]
    return text[start + 1 :]


def without_location(line: str) -> tuple[str, str]:
    """Splits a line into the text before its trailing `loc(...)` and the content of these
    brackets.
    """
    start = line.rfind(" loc(")
    if start < 0 or not line.endswith(")"):
        return line, ""
    depth = 0
    for place in range(start + 4, len(line)):
        depth += (line[place] == "(") - (line[place] == ")")
        if depth == 0:
            if place + 1 == len(line):
                return line[:start], line[start + 5 : -1]
            break
    # Brackets within: the outermost loc( that reaches the end.
    outer = line.rfind(" loc(", 0, start)
    while outer >= 0:
        depth = 0
        for place in range(outer + 4, len(line)):
            depth += (line[place] == "(") - (line[place] == ")")
            if depth == 0:
                break
        if depth == 0 and place + 1 == len(line):
            return line[:outer], line[outer + 5 : -1]
        outer = line.rfind(" loc(", 0, outer)
    return line, ""


def type_section(text: str) -> str:
    """Text behind the last ` : ` outside brackets; empty without one."""
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        character = text[place]
        if character in ">)}]" and not (character == ">" and text[place - 1] == "-"):
            depth += 1
        elif character in "<({[":
            depth -= 1
        elif depth == 0 and text.startswith(" : ", place):
            return text[place + 3 :].strip()
    return ""


class Parser:
    """Reads the lines of a module."""

    def __init__(self, text: str) -> None:
        lines = [each.strip() for each in text.splitlines()]
        self.locations = {match[1]: match[2] for each in lines if (match := LOCATION.match(each))}
        self.lines = [each for each in lines if each and not each.startswith("#")]
        self.next = 0
        self.kernel = "?"

    def fail(self, line: str, what: str) -> NoReturn:
        raise UnsupportedOperationError(
            f"Triton kernel {self.kernel}, {self.place(without_location(line)[1])}: {what}, which "
            "virtual NPUs do not execute."
        )

    def place(self, location: str) -> str:
        """`file.py:12` for a location; for an inlined function, the line inside it."""
        for _ in range(32):
            if found := FILE.search(location):
                return f"{found[1]}:{found[2]}"
            references = REFERENCE.findall(location)
            known = [self.locations.get(each, "") for each in references]
            location = next((each for each in known if each not in {"", "unknown"}), "")
            if not location:
                break
        return "an unknown line"

    def module(self) -> Module:
        functions: dict[str, Function] = {}
        kernel = None
        while self.next < len(self.lines):
            line = self.lines[self.next]
            self.next += 1
            if not line.startswith("tt.func "):
                continue
            function, is_public = self.function(line)
            functions[function.name] = function
            if is_public:
                kernel = function
        if kernel is None:
            raise UnsupportedOperationError("a module without a kernel")
        return Module(kernel, functions)

    def function(self, line: str) -> tuple[Function, bool]:
        match = FUNCTION.match(line)
        if match is None:
            self.fail(line, f"the function {line[:80]}")
        name = match[2].strip('"')
        if match[1] == "public":
            self.kernel = name
        parameters = []
        for each in split_list(bracketed(line, match.end())):
            parameter, _, described = without_location(each)[0].partition(": ")
            parameters.append((parameter[1:], Value(self.type(line, described.split(" {")[0]))))
        scope = {f"%{each}": value for each, value in parameters}
        blocks, _ = self.region(scope)
        return Function(name, parameters, blocks), match[1] == "public"

    def type(self, line: str, text: str) -> Type:
        try:
            return parse_type(text)
        except UnsupportedOperationError as error:
            self.fail(line, str(error))

    def region(self, outer: dict[str, Value]) -> tuple[list[Block], str]:
        """Parses blocks up to the closing brace; returns them and the line with the brace."""
        scope = dict(outer)
        blocks = [Block("", [])]
        while True:
            line = self.lines[self.next]
            self.next += 1
            if line.startswith("}"):
                if not blocks[0].operations and not blocks[0].arguments and len(blocks) > 1:
                    del blocks[0]
                return blocks, line
            if match := BLOCK.match(line):
                block = Block(match[1], [])
                for each in split_list(match[2] or ""):
                    name, _, described = without_location(each)[0].partition(": ")
                    block.arguments.append(self.define(scope, name, self.type(line, described)))
                blocks.append(block)
                continue
            blocks[-1].operations.append(self.operation(line, scope))

    @staticmethod
    def define(scope: dict[str, Value], name: str, of: Type) -> Value:
        scope[name] = value = Value(of)
        return value

    def operation(self, line: str, scope: dict[str, Value]) -> Operation:
        body, location = without_location(line)
        names: list[str] = []
        if match := RESULTS.match(body):
            for each in match[1].split(", "):
                name, _, several = each.partition(":")
                names += [f"{name}#{i}" for i in range(int(several))] if several else [name]
            body = body[match.end() :]
        named = OPERATION.match(body)
        assert named is not None, line
        name, text = named[1], body[named.end() :]
        operation = Operation(name, text, [], [], "")
        if text.endswith("{"):
            location = self.regions(operation, scope)
        else:
            operation.operands = self.operands(line, text, scope)
        operation.place = self.place(location)
        for each, of in zip(names, self.result_types(line, operation, len(names)), strict=True):
            operation.results.append(self.define(scope, each, of))
        return operation

    def operands(self, line: str, text: str, scope: dict[str, Value]) -> list[Value]:
        found = []
        for each in OPERAND.findall(re.sub(r'"[^"]*"', "", text)):
            if each not in scope:
                self.fail(line, f"the value {each}")
            found.append(scope[each])
        return found

    def regions(self, operation: Operation, scope: dict[str, Value]) -> str:
        """Parses operands and regions of an operation that opens a brace; returns its location."""
        text = operation.text.removesuffix("{").removesuffix("(").strip()
        inner = dict(scope)
        bound: list[Value] = []
        if operation.name in {"scf.for", "scf.while"}:
            bound = self.bind(operation, text, inner)
        else:
            operation.operands = self.operands(text, text, scope)
        while True:
            blocks, closing = self.region(inner)
            operation.regions.append(blocks)
            if len(operation.regions) == 1:
                blocks[0].arguments = [*bound, *blocks[0].arguments]
            inner = dict(scope)
            if not closing.startswith(("} else {", "} do {", "}, {")):
                break
        rest, location = without_location(closing)
        operation.text = f"{text} {rest.lstrip('})')}".strip()
        return location

    def bind(self, operation: Operation, text: str, inner: dict[str, Value]) -> list[Value]:
        """Finds a loop's operands; its counter and loop-carried values become values of its
        region.
        """
        bound = {}
        counter = re.match(r"(?:unsigned )?(%[\w$.-]+) = (\S+) to (\S+) step (\S+)", text)
        if counter is not None:
            operation.operands = self.operands(text, " ".join(counter.group(2, 3, 4)), inner)
            bound[counter[1]] = operation.operands[0].type
        start = text.find("iter_args(") if operation.name == "scf.for" else 0
        if start >= 0:
            start = text.index("(", start) + 1
            for each in split_list(text[start : text.index(")", start)]):
                name, _, given = each.partition(" = ")
                operation.operands += self.operands(text, given, inner)
                bound[name] = operation.operands[-1].type
        return [self.define(inner, name, of) for name, of in bound.items()]

    def result_types(self, line: str, operation: Operation, count: int) -> Iterator[Type]:
        if count == 0:
            return iter(())
        name, operands = operation.name, operation.operands
        if name == "arith.constant" and operation.text.startswith(("true", "false")):
            return iter([Type("i1")])
        types = type_section(operation.text)
        if name == "scf.for":
            arrow = re.search(r"-> \((.*?)\)\s*(?::|$)", operation.text)
            types = f"-> ({arrow[1]})" if arrow else types
        elif name == "scf.if":
            types = operation.text[operation.text.index("->") :]
        if "->" in types:
            listed = types.rsplit("->", 1)[1].strip()
            listed = listed[1:-1] if listed.startswith("(") else listed
            results = [self.type(line, each) for each in split_list(listed)]
            return iter(results * count if len(results) == 1 else results)  # a split lists it once
        if " to " in types:
            return iter([self.type(line, types.rsplit(" to ", 1)[1])])
        listed_types = split_list(types)
        if name in {"arith.cmpi", "arith.cmpf"}:
            return iter([Type("i1", operands[0].type.shape)])
        if name == "tt.load":
            pointer = operands[0].type
            return iter(
                [Type(parse_type(pointer.pointee).element, pointer.shape, self.target(pointer))]
            )
        if name == "arith.select":
            return iter([self.type(line, listed_types[-1])])
        return iter([self.type(line, listed_types[0])] * count)

    @staticmethod
    def target(pointer: Type) -> str:
        return parse_type(pointer.pointee).pointee


def parse(text: str) -> Module:
    """Parses a module. Raises UnsupportedOperationError naming kernel and line."""
    return Parser(text).module()
