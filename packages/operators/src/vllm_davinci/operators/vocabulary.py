"""Look-up in a vocabulary divided among ranks."""

from torch import Tensor


def vocab_parallel_embedding(
    token_ids: Tensor, weight: Tensor, first_row: int, num_rows: int
) -> Tensor:
    """A rank's part of the embedding; zeros for tokens of other ranks.

    token_ids: [num_tokens], int32 or int64
    weight:    [at least num_rows, embedding_dim], this rank's rows
    Returns [num_tokens, embedding_dim]; the sum over ranks is the embedding.
    """
    rows = token_ids.long() - first_row
    is_foreign = (rows < 0) | (rows >= num_rows)
    return weight[rows.masked_fill(is_foreign, 0)].masked_fill(is_foreign.unsqueeze(-1), 0)
