"""A decoder layer of the usual shape that can leave each rank its share of the tokens.

vLLM's layers sum what tensor-parallel ranks have computed over all ranks, and each rank then
repeats norm and residual sum for every token. Here each rank receives the sum of its share of the
tokens only, does that work on its share, and what attention or the MLP needs of the others is
gathered. Reduction, that work and gathering are one exchange: other ubatches compute beside
all of it.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_reduce

from vllm_davinci.core.distributed.exchange import exchange
from vllm_davinci.models.token_shares import TokenShares

CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class Divided(NamedTuple):
    """Hidden states on their way between ranks: settled shares of the rows, or parts of sums.

    rows:  [size, hidden_size] of this rank, or its part of all sums: [num_tokens, hidden_size]
    is_partial: which of the two
    scale: of the sum, where float16 wants smaller numbers
    """

    rows: torch.Tensor
    is_partial: bool = False
    scale: float = 1.0

    def settle(self, shares: TokenShares) -> torch.Tensor:
        """This rank's share of the rows."""
        if not self.is_partial:
            return self.rows
        share = shares.reduce(self.rows)
        return share if self.scale == 1.0 else share.mul_(self.scale)


class NPUDecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. Its two sums over ranks are of all tokens or of a share of them.

    The sum that comes in is the residual's: the norm in front of attention adds it.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: Any

    def __init__(self, layer: nn.Module) -> None:
        """Takes over the modules of vLLM's layer, under the same names. Sums become its own."""
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
        """Whether vLLM's layer has these parts and no others, such as a second condition."""
        return {name for name, _ in layer.named_children()} == CHILDREN

    def output_projection(self) -> Any:
        """The row-parallel layer in which attention ends."""
        return self.self_attn.o_proj

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        *unused: None,
        **unused_by_name: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, then the dense or sparse MLP, of rows that every rank has.

        positions:               [num_tokens] or [3, num_tokens], int64
        hidden_states, residual: [num_tokens, hidden_size]
        unused:                  what other models' layers take; all None
        Returns hidden states and residual of the same rows.
        """
        assert all(extra is None for extra in (*unused, *unused_by_name.values()))
        rows, residual = self._norm(self.input_layernorm, hidden_states, residual)
        rows = tensor_model_parallel_all_reduce(self.attend(positions, rows))
        scale, residual = self.after_attention(rows.dtype, residual)
        rows, residual = self.post_attention_layernorm(_scaled(rows, scale), residual)
        rows = tensor_model_parallel_all_reduce(self.mlp(rows))
        return _scaled(rows, self.after_mlp(rows.dtype)), residual

    def forward_divided(
        self,
        positions: torch.Tensor,
        hidden_states: Divided,
        residual: torch.Tensor | None,
        shares: TokenShares,
    ) -> tuple[Divided, torch.Tensor]:
        """The same; each rank has its share of residual and hidden states.

        positions: [num_tokens] or [3, num_tokens], int64; residual: [size, hidden_size]
        """

        def before_attention() -> tuple[torch.Tensor, torch.Tensor]:
            share, total = self._norm(self.input_layernorm, hidden_states.settle(shares), residual)
            return shares.gather(self.needed_of_others(share)), total

        rows, total = exchange(before_attention)
        partial = self.attend_gathered(positions, rows)
        scale, total = self.after_attention(partial.dtype, total)
        attended = Divided(partial, True, scale)

        def before_mlp() -> tuple[torch.Tensor, torch.Tensor]:
            share, sums = self.post_attention_layernorm(attended.settle(shares), total)
            return shares.gather(share), sums

        rows, sums = exchange(before_mlp)
        return Divided(self.mlp(rows), True, self.after_mlp(rows.dtype)), sums

    def attend(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """This rank's part of attention's sum, of all rows: [num_tokens, hidden_size]."""
        attended: torch.Tensor = self.self_attn(positions=positions, hidden_states=hidden_states)
        return attended

    def needed_of_others(self, share: torch.Tensor) -> torch.Tensor:
        """What attention needs of the tokens of other ranks: [size, hidden_size] -> [size, n]."""
        return share

    def attend_gathered(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`attend`, of what `needed_of_others` returned on all ranks: [num_tokens, n]."""
        return self.attend(positions, rows)

    def after_attention(
        self, dtype: torch.dtype, residual: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Factor of attention's sum, and the residual to which that is added."""
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
