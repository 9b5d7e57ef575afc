"""Routed experts in pieces of a step's tokens, so that the rows of a large step fit into memory."""

from dataclasses import dataclass


@dataclass
class ExpertPieces:
    """The tokens whose rows one layer's experts take at once.

    max_tokens: None where one piece holds every step; set once, before memory is measured
    """

    max_tokens: int | None = None

    def count(self, num_tokens: int) -> int:
        """The number of pieces of so many tokens."""
        return 1 if self.max_tokens is None else max(1, -(-num_tokens // self.max_tokens))

    def of(self, num_tokens: int, of_step: int | None = None) -> list[slice]:
        """A step's tokens in pieces of one size, of which the last ones may be smaller.

        of_step: the most tokens of any rank, where ranks must have equally many pieces
        """
        most = num_tokens if of_step is None else of_step
        count = self.count(most)
        size = -(-most // count)
        return [slice(number * size, (number + 1) * size) for number in range(count)]
