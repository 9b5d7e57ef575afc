"""Places the values of a program in its frame."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from vllm_davinci.vnpu.triton_backend.instructions import LoweredBlock, used_by

ALIGNMENT = 64  # bytes


class Frame:
    """Allocates space in the frame and reuses freed space of the same size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = [-(-each // ALIGNMENT) * ALIGNMENT for each in sizes]
        self.offsets = [0] * len(sizes)
        self.end = 0
        self.free: defaultdict[int, list[int]] = defaultdict(list)

    def place(self, number: int) -> None:
        size = self.sizes[number]
        if self.free[size]:
            self.offsets[number] = self.free[size].pop()
        else:
            self.offsets[number] = self.end
            self.end += size

    def release(self, number: int) -> None:
        self.free[self.sizes[number]].append(self.offsets[number])


def place_region(frame: Frame, blocks: list[LoweredBlock]) -> list[int]:
    """Places the values that a region defines; returns those still in use at its end.

    Block arguments keep their room throughout, as each iteration writes them at its end. So do
    values that one block defines and another uses.
    """
    kept: list[int] = []
    for block in blocks:
        for each in block.arguments:
            frame.place(each)
            kept.append(each)
    used = [[used_by(each) for each in block.body] for block in blocks]
    everywhere = [set().union(*each) for each in used]
    for place, block in enumerate(blocks):
        elsewhere = set().union(*everywhere[:place], *everywhere[place + 1 :])
        last = {each: number for number, uses in enumerate(used[place]) for each in uses}
        ending: defaultdict[int, list[int]] = defaultdict(list)
        for number, instruction in enumerate(block.body):
            for each in instruction.results:
                frame.place(each)
                if each in elsewhere:
                    kept.append(each)
                else:
                    ending[last.get(each, number)].append(each)
            inner = [place_region(frame, region) for region in instruction.regions]
            for region_values in inner:
                for each in region_values:
                    frame.release(each)
            if number + 1 == len(block.body):
                kept += ending[number]
            else:
                for each in ending[number]:
                    frame.release(each)
    return kept


def assign_offsets(
    functions: list[tuple[list[int], list[LoweredBlock]]],
    sizes: Sequence[int],
    constants: Collection[int],
) -> tuple[list[int], int]:
    """Returns each value's offset and the frame's bytes. Each function has its own part of it.

    functions: parameters and blocks of each
    """
    frame = Frame(sizes)
    for each in constants:
        frame.place(each)
    for arguments, blocks in functions:
        frame.free.clear()
        for each in arguments:
            frame.place(each)
        place_region(frame, blocks)
    return frame.offsets, frame.end
