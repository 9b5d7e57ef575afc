"""Choice of the blocks of keys that each query attends to, composed of torch operators."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_davinci.core.attention.composed_plan import Piece, most_elements
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

# Fewer widths mean fewer graphs, but more scores for blocks that no request has.
GRAPH_FACTOR = 4


@dataclass(frozen=True)
class BlockRule:
    """A model's rule for choosing blocks of BLOCK_SIZE_TOKENS keys.

    num_chosen: blocks per query and key head
    num_local:  how many of them are always the last blocks up to the query's own; at least 1
    index_size: entries of the index keys
    """

    num_chosen: int
    num_local: int
    index_size: int

    @classmethod
    def of_model(
        cls, block_size: int, num_chosen: int, num_local: int, index_size: int, num_first: int = 0
    ) -> "BlockRule":
        """Raises UnsupportedFeatureError for unsupported rules. num_first: first blocks always
        chosen"""
        wrong = {
            f"blocks of {block_size} keys (must be {BLOCK_SIZE_TOKENS})": (
                block_size != BLOCK_SIZE_TOKENS
            ),
            "a choice that may omit the query's own block": num_local < 1,
            "first blocks that are always chosen": num_first > 0,
        }
        if named := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise UnsupportedFeatureError(
                f"The model's sparse attention has {' and '.join(named)}, which {RELEASE} does not "
                "support. Choose another model."
            )
        return cls(num_chosen, num_local, index_size)

    def graph_widths(self, num_blocks: int) -> tuple[int, ...]:
        """Numbers of blocks per request that graphs score, ascending, for up to `num_blocks`.

        The first graph chooses nothing. A step scores up to GRAPH_FACTOR times its own blocks.
        """
        widths = [self.num_chosen]
        while widths[-1] < num_blocks:
            widths.append(widths[-1] * GRAPH_FACTOR)
        return tuple(widths)


def choose_blocks(
    query: torch.Tensor,
    index_k: torch.Tensor,
    pieces: Iterable[Piece],
    block_table: torch.Tensor,
    rule: BlockRule,
) -> torch.Tensor:
    """Chooses the blocks whose best key has the highest score, for each query and key head.

    query:   [num_tokens, num_heads, index_size]
    index_k: [num_blocks, block_size, index_size]
    pieces:  the step's tokens, in chunks
    Returns pages [num_tokens, num_heads, num_chosen], int32, in token order. The query's own block
    comes last; entries after it are arbitrary pages.
    Scores are fp32. Source: transformers' MiniMaxM3VLIndexer.
    """
    pages = block_table.new_zeros(*query.shape[:2], rule.num_chosen)
    for piece in pieces:
        of_piece = query[piece.rows].unflatten(0, (piece.num_requests, -1))
        blocks = block_table[piece.requests, : piece.num_blocks]
        chosen = _chosen_of_piece(of_piece, index_k, piece.positions, blocks, rule)
        width = chosen.shape[-1]
        pages[piece.rows, :, :width] = blocks.gather(1, chosen.flatten(1)).view(
            -1, query.shape[1], width
        )
    return pages


def _chosen_of_piece(
    query: torch.Tensor,
    index_k: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    rule: BlockRule,
) -> torch.Tensor:
    """Indices of the chosen blocks in their requests, ascending: [requests, tokens, heads, width].

    query:     [requests, tokens, heads, index_size]
    positions: [requests, tokens]
    blocks:    [requests, blocks per request], int32
    """
    num_requests, num_blocks = blocks.shape
    keys = index_k.index_select(0, blocks.flatten()).view(num_requests, -1, query.shape[-1])
    scores = query.float().flatten(1, 2) @ keys.float().transpose(1, 2)
    scores = scores.view(*query.shape[:3], -1)
    places = torch.arange(keys.shape[1], device=query.device)
    scores.masked_fill_((places > positions[..., None])[:, :, None], float("-inf"))
    best = scores.unflatten(-1, (num_blocks, -1)).amax(-1)
    numbers = torch.arange(num_blocks, device=query.device)
    back = (positions // BLOCK_SIZE_TOKENS)[..., None] - numbers
    is_local = (back >= 0) & (back < rule.num_local)
    best.masked_fill_(is_local[:, :, None], float("inf"))
    chosen = best.topk(min(rule.num_chosen, num_blocks), dim=-1).indices
    own = positions[..., None, None] // BLOCK_SIZE_TOKENS
    later = chosen.masked_fill(chosen > own, num_blocks)
    ordered: torch.Tensor = later.sort(dim=-1).values.clamp_(max=num_blocks - 1)
    return ordered


def take_most_memory(query: torch.Tensor, rule: BlockRule, max_model_len: int) -> None:
    """Allocates and frees the memory of `choose_blocks`, so that vLLM's profile run counts it."""
    keys, scores = most_elements(query.shape[1], rule.index_size, max_model_len)
    held = [query.new_empty(keys), query.new_empty(keys, dtype=torch.float32)]
    held += [query.new_empty(scores, dtype=torch.float32) for _ in range(2)]
    del held
