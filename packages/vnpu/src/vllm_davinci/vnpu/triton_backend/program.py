"""Writes a lowered kernel as vnpu's C++ reads it (csrc/triton/program.cpp)."""

from array import array
from collections.abc import Sequence

from vllm_davinci.vnpu.triton_backend.frame import assign_offsets
from vllm_davinci.vnpu.triton_backend.instructions import Instruction, LoweredBlock
from vllm_davinci.vnpu.triton_backend.lowering import BYTES, TYPES, Lowering
from vllm_davinci.vnpu.triton_backend.ttir import Module

FORMAT = 0x766E707531  # program.cpp compares it


class Words:
    """Integers of 64 bits, and texts that they refer to by number."""

    def __init__(self) -> None:
        self.words = array("q")
        self.texts: dict[str, int] = {}

    def add(self, *numbers: int) -> None:
        self.words.extend((each + 2**63) % 2**64 - 2**63 for each in numbers)

    def add_list(self, numbers: Sequence[int]) -> None:
        self.add(len(numbers), *numbers)

    def add_text(self, text: str) -> None:
        self.add(self.texts.setdefault(text.replace("\0", " "), len(self.texts)))

    def add_region(self, blocks: list[LoweredBlock]) -> None:
        self.add(len(blocks))
        for block in blocks:
            self.add_list(block.arguments)
            self.add(len(block.body))
            for each in block.body:
                self.add_instruction(each)

    def add_instruction(self, instruction: Instruction) -> None:
        self.add_text(instruction.name)
        self.add_text(instruction.place)
        self.add_text(instruction.text)
        self.add_list(instruction.results)
        self.add_list(instruction.operands)
        self.add_list(instruction.attributes)
        self.add(len(instruction.regions))
        for region in instruction.regions:
            self.add_region(region)

    def packed(self) -> bytes:
        texts = b"".join(each.encode() + b"\0" for each in self.texts)
        header = array("q", [FORMAT, len(self.words), len(texts)])
        return header.tobytes() + self.words.tobytes() + texts


def write_program(module: Module) -> bytes:
    """The kernel as vnpu's C++ reads it. Raises UnsupportedOperation naming kernel and line."""
    lowering = Lowering(module)
    lowering.spread_roots()
    uses: dict[int, list[bool]] = {}
    for instruction, reads, writes in lowering.accesses:
        roots = lowering.roots.get(instruction.operands[0], {-1})
        for root in roots - {-1}:
            of_root = uses.setdefault(root, [False, False])
            of_root[0] |= reads
            of_root[1] |= writes
        instruction.attributes[0] = next(iter(roots)) if len(roots) == 1 else -1
    sizes = [each.count * BYTES[TYPES[each.element]] for each in lowering.types]
    offsets, frame_bytes = assign_offsets(lowering.functions, sizes, lowering.constants)
    words = Words()
    words.add_text(module.kernel.name)
    cost = lowering.cost
    words.add(frame_bytes, cost.operations, cost.loaded_bytes, cost.stored_bytes, cost.has_loops)
    words.add(lowering.synchronizes())
    words.add(len(cost.products))
    for product in cost.products:
        words.add(*product)
    words.add(len(lowering.types))
    for number, each in enumerate(lowering.types):
        words.add(TYPES[each.element], each.count, offsets[number])
        words.add_list(each.shape)
    words.add(len(module.kernel.parameters))
    for place, (name, value) in enumerate(module.kernel.parameters):
        words.add_text(name)
        words.add(lowering.of(value), *uses.get(place, (False, False)))
    words.add(len(lowering.constants))
    for number, bits in lowering.constants.items():
        words.add(number, bits)
    words.add(len(lowering.functions))
    for arguments, blocks in lowering.functions:
        words.add_list(arguments)
        words.add_region(blocks)
    return words.packed()
