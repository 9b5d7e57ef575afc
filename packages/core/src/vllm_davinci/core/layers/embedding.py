"""Token embedding, divided over the ranks by vocabulary."""

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op


class NPUVocabParallelEmbedding(VocabParallelEmbedding):
    """The lookup without vLLM's compiled masking function, which costs seconds at start."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens; every rank returns all of them.

        input_: [num_tokens], int32 or int64
        Returns [num_tokens, embedding_dim].
        """
        if type(self.quant_method) is not UnquantizedEmbeddingMethod:
            return super().forward(input_)
        if not self.reduce_results or self.parallel_group is not None:
            return super().forward(input_)
        if self.tp_size == 1:
            return torch.nn.functional.embedding(input_, self.weight)
        indices = self.shard_indices
        if indices.num_added_elements > 0:
            return super().forward(input_)
        look_up = fused_op(operators.vocab_parallel_embedding)
        if look_up is not None and input_.dim() == 1:
            partial = look_up(
                token_ids=input_,
                weight=self.weight.data,
                first_row=indices.org_vocab_start_index,
                num_rows=indices.num_org_elements,
            )
            return tensor_model_parallel_all_reduce(partial)
        row = input_ - indices.org_vocab_start_index
        is_foreign = (row < 0) | (row >= indices.num_org_elements)
        partial = torch.nn.functional.embedding(row.masked_fill(is_foreign, 0), self.weight)
        partial.masked_fill_(is_foreign.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(partial)
