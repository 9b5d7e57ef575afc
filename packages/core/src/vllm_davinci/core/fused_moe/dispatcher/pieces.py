"""Runs routed experts in chunks of tokens, so that the rows of a large step fit into memory."""

from dataclasses import dataclass


@dataclass
class ExpertPieces:
    """Chunk size of one layer's experts.

    max_tokens: None if one chunk holds every step; set once, before memory is measured
    """

    max_tokens: int | None = None

    def count(self, num_tokens: int) -> int:
        """Number of chunks for `num_tokens` tokens."""
        return 1 if self.max_tokens is None else max(1, -(-num_tokens // self.max_tokens))

    def of(self, num_tokens: int, of_step: int | None = None) -> list[slice]:
        """Divides a step's tokens into chunks of one size; the last ones may be smaller.

        of_step: the most tokens of any rank, if all ranks must have the same number of chunks
        """
        most = num_tokens if of_step is None else of_step
        count = self.count(most)
        size = -(-most // count)
        return [slice(number * size, (number + 1) * size) for number in range(count)]
