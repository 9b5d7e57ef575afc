"""Instructions of a lowered kernel."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Instruction:
    name: str
    place: str
    results: list[int] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    attributes: list[int] = field(default_factory=list)
    regions: list[list[LoweredBlock]] = field(default_factory=list)
    text: str = ""


@dataclass(eq=False)
class LoweredBlock:
    arguments: list[int]
    body: list[Instruction]


def used_by(instruction: Instruction) -> set[int]:
    """Values that the instruction or its regions use."""
    used = set(instruction.operands)
    for region in instruction.regions:
        for block in region:
            for each in block.body:
                used |= used_by(each)
    return used
