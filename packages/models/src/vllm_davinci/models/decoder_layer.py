"""A standard decoder layer that can run sequence parallel.

vLLM's layers all-reduce the tensor-parallel ranks' results, and each rank then repeats norm and
residual sum for every token. Here a reduce-scatter gives each rank the sums of its shard of tokens,
the rank normalizes that shard, and an all-gather brings the other shards' inputs for attention or
the MLP. Reduce-scatter, norm and all-gather form one exchange, during which other ubatches compute.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce

from vllm_davinci.core.distributed.beside_ubatches import run_beside_ubatches
from vllm_davinci.models.token_shards import TokenShards

CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class ShardedStates(NamedTuple):
    """Hidden states between two layers: a rank's shard, or its partial sums of all rows.

    rows:       [size, hidden_size], the shard; or [num_tokens, hidden_size], the partial sums
    is_partial: whether rows are partial sums, not yet reduced over ranks
    scale:      factor of the sum, which keeps float16 from overflowing
    """

    rows: torch.Tensor
    is_partial: bool = False
    scale: float = 1.0

    def reduced(self, shards: TokenShards) -> torch.Tensor:
        """This rank's shard of the sums: [size, hidden_size]."""
        if not self.is_partial:
            return self.rows
        shard = shards.reduce_scatter(self.rows)
        return shard if self.scale == 1.0 else shard.mul_(self.scale)


class NPUDecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. Its two reductions cover all tokens or are sequence parallel.

    The incoming sum belongs to the residual: the norm before attention adds it.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: Any

    def __init__(self, layer: nn.Module) -> None:
        """Takes over the modules of vLLM's layer under their names, and does the reductions."""
        super().__init__()
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.output_projection().reduce_results = False
        experts: Any = getattr(self.mlp, "experts", None)
        self.is_dense = experts is None
        if experts is None:
            self.mlp.down_proj.reduce_results = False
        else:
            experts.moe_config.skip_final_all_reduce = True

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """True if vLLM's layer has exactly these parts, and for example no time condition."""
        return {name for name, _ in layer.named_children()} == CHILDREN

    def output_projection(self) -> Any:
        """The row-parallel layer at the end of attention."""
        return self.self_attn.o_proj

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        *unused: None,
        **unused_by_name: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, then the dense or sparse MLP, on rows that every rank holds.

        positions:               [num_tokens] or [3, num_tokens], int64
        hidden_states, residual: [num_tokens, hidden_size]
        unused:                  other models' arguments; all None
        Returns hidden states and residual of the same rows.
        """
        assert all(extra is None for extra in (*unused, *unused_by_name.values()))
        rows, residual = self._norm(self.input_layernorm, hidden_states, residual)
        rows = tensor_model_parallel_all_reduce(self.attend(positions, rows))
        scale, residual = self.after_attention(rows.dtype, residual)
        rows, residual = self.post_attention_layernorm(_scaled(rows, scale), residual)
        rows = tensor_model_parallel_all_reduce(self.mlp(rows))
        return _scaled(rows, self.after_mlp(rows.dtype)), residual

    def forward_sequence_parallel(
        self,
        positions: torch.Tensor,
        hidden_states: ShardedStates,
        residual: torch.Tensor | None,
        shards: TokenShards,
    ) -> tuple[ShardedStates, torch.Tensor]:
        """`forward`, sequence parallel: each rank has its shard of residual and hidden states.

        positions: [num_tokens] or [3, num_tokens], int64; residual: [size, hidden_size]
        """

        def before_attention() -> tuple[torch.Tensor, torch.Tensor]:
            shard, total = self._norm(self.input_layernorm, hidden_states.reduced(shards), residual)
            return shards.all_gather(self.attention_input(shard)), total

        rows, total = run_beside_ubatches(before_attention)
        partial = self.attend_gathered(positions, rows)
        scale, total = self.after_attention(partial.dtype, total)
        attended = ShardedStates(partial, True, scale)

        def before_mlp() -> tuple[torch.Tensor, torch.Tensor]:
            shard, sums = self.post_attention_layernorm(attended.reduced(shards), total)
            return shards.all_gather(shard), sums

        rows, sums = run_beside_ubatches(before_mlp)
        return ShardedStates(self.mlp(rows), True, self.after_mlp(rows.dtype)), sums

    def attend(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of attention, for all rows: [num_tokens, hidden_size]."""
        attended: torch.Tensor = self.self_attn(positions=positions, hidden_states=hidden_states)
        return attended

    def attention_input(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of each row that attention needs: [size, hidden_size] -> [size, n]."""
        return shard

    def attend_gathered(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`attend`, from gathered results of `attention_input`: [num_tokens, n]."""
        return self.attend(positions, rows)

    def after_attention(
        self, dtype: torch.dtype, residual: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """The factor of attention's sum, and the residual to which the sum is added."""
        return 1.0, residual

    def after_mlp(self, dtype: torch.dtype) -> float:
        """Factor of the MLP's sum."""
        return 1.0

    @staticmethod
    def _norm(
        norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return norm(hidden_states), hidden_states
        normed, total = norm(hidden_states, residual)
        return normed, total


def _scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    return rows if scale == 1.0 else rows.mul_(scale)
