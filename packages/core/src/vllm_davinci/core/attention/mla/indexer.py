"""Lightning indexer of DeepSeek V3.2: chooses the cached tokens each query attends to."""

from typing import Any

import torch
import torch_npu
from torch import nn

from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadata

# Sizes that the operator supports. Source: aclnnLightningIndexer.md, constraints.
HEAD_SIZE = 128
MAX_HEADS = 64


class TokenIndexer:
    """Scores a layer's cached tokens for each query and chooses the best.

    Keys and queries stay in the model's dtype. Other devices' kernels rotate both (Hadamard) and
    round them to 8 bits, which changes only cost and rounding.

    modules:    vLLM's Indexer, for its weights; its own forward calls kernels of other devices
                its `rotates_last` says that the last entries of heads are rotated, not the first
    rotary_emb: rotates entries of the indexer's heads
    """

    def __init__(self, modules: Any, rotary_emb: nn.Module) -> None:
        self._modules = modules
        self._rotary_emb = rotary_emb
        self.num_chosen: int = modules.topk_tokens
        self._rope_size: int = modules.rope_dim
        self._rotates_last: bool = getattr(modules, "rotates_last", False)
        # Projected queries, their rotated part, and both concatenated.
        self.elements_per_token: int = 3 * modules.n_head * modules.head_dim
        self._scale = float(modules.softmax_scale * modules.n_head_scale)

    def project(
        self, hidden_states: torch.Tensor, q_c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projects a step's tokens.

        hidden_states: [num_tokens, hidden_size]
        q_c:           [num_tokens, q_lora_rank], after its norm
        Returns queries [num_tokens, heads, size] and keys [num_tokens, size], before rotation, and
        the heads' weights [num_tokens, heads] in fp32.
        """
        modules = self._modules
        query = modules.wq_b(q_c)[0].view(-1, modules.n_head, modules.head_dim)
        key, weights = modules.wk_weights_proj(hidden_states)[0].split(
            [modules.head_dim, modules.n_head], dim=-1
        )
        return query, modules.k_norm(key), weights.float() * self._scale

    def choose(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        cache: MLACache,
        metadata: SparseMLAMetadata,
    ) -> torch.Tensor:
        """Writes the step's keys into the cache and chooses among all tokens of each request.

        positions:           [num_actual_tokens], int64
        query, key, weights: of `project`
        Returns [num_actual_tokens, 1, num_chosen], int32: positions in the request, then -1 if
        there are fewer.
        """
        assert cache.index_k is not None
        num_tokens, heads, size = query.shape
        sizes = [self._rope_size, size - self._rope_size]
        order = -1 if self._rotates_last else 1
        q_pe, q_nope = query.split(sizes[::order], dim=-1)[::order]
        k_pe, k_nope = key.split(sizes[::order], dim=-1)[::order]
        q_pe, k_pe = self._rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
        query = torch.cat([q_pe.reshape(num_tokens, heads, -1), q_nope], dim=-1)
        key = torch.cat([k_pe.reshape(num_tokens, -1), k_nope], dim=-1)
        torch_npu.npu_scatter_nd_update_(cache.index_k.view(-1, size), metadata.rows_of_slots, key)
        chosen, _ = torch_npu.npu_lightning_indexer(
            query,
            cache.index_k,
            weights,
            actual_seq_lengths_query=metadata.query_ends,
            actual_seq_lengths_key=metadata.seq_lens,
            block_table=metadata.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self.num_chosen,
        )
        return chosen
