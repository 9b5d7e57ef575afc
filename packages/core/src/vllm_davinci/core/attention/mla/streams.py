"""The stage before MLA on two streams, in steps of decodes alone.

    side:          | W_DKV           | kv-op      |        | q-rope |
    main:  | W_DQ  | q-norm, cos/sin | W_UQ       | split  | W_UK   | attention | W_UV | W_O

The weights of W_DQ and W_O are fetched into the cache before their inputs are there.

Matrix products run one at a time; norms, rotations and the cache write run beside them. Where a
compiled operator does the stage, it keeps this order between the two streams; without one, W_DQ and
W_DKV of int8 stay one product, whose bits are the same.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_davinci.core.attention.mla.preprocess import Preprocessed, preprocess_at_once
from vllm_davinci.core.components.protocols import Fork, StreamScheduler
from vllm_davinci.core.layers.prefetch import prefetch

if TYPE_CHECKING:
    from vllm_davinci.core.attention.mla.layer import NPUMultiHeadLatentAttention
    from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata

SIDE = "vector"


class PreprocessOnTwoStreams:
    """One block's `preprocess` of steps without prefills."""

    def __init__(self, scheduler: StreamScheduler) -> None:
        self._scheduler = scheduler
        self._down: tuple[torch.Tensor, ...] | None = None  # W_DQ, W_DKV; views, taken once

    def __call__(
        self,
        block: "NPUMultiHeadLatentAttention",
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: "NPUMLAMetadata",
    ) -> Preprocessed:
        """The current stream ends behind the work of both.

        positions:     [num_tokens], int64
        hidden_states: [num_tokens, hidden_size]
        """
        if block.q_lora_rank is not None:
            prefetch(block.fused_qkv_a_proj.weight)
        with self._scheduler.fork(SIDE) as fork:
            at_once = preprocess_at_once(block, positions, hidden_states, metadata, fork.stream)
            if at_once is not None:
                return at_once
            queries, kv = self._compress(block, hidden_states, fork)
            table = block.rotary_emb._match_cos_sin_cache_dtype(hidden_states)
            cos, sin = metadata.rotary_rows(table, positions)
            project = block.q_proj
            if block.q_lora_rank is not None:
                queries, project = block.q_a_layernorm(queries), block.q_b_proj
            fork.join()  # the queries' product waits for W_DKV: two products would contend

            def write_cache(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
                block.write_cache(kv, cos, sin, metadata)

            fork.run(write_cache, kv, cos, sin)
            q = project(queries)[0].view(-1, block.num_heads, block.qk_head_dim)
            q_nope, q_rope = q.split([block.qk_nope_head_dim, block.qk_rope_head_dim], dim=-1)
            rotated = fork.run(torch_npu.npu_interleave_rope, q_rope.unsqueeze(2), cos, sin)
            absorbed = block.mla_attn.impl.absorb(q_nope)
        return Preprocessed(absorbed, rotated.squeeze(2), None, None, None)

    def _compress(
        self, block: "NPUMultiHeadLatentAttention", hidden_states: torch.Tensor, fork: Fork
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the queries' up-projection, before its norm, and of the kv-op."""
        if block.q_lora_rank is None:
            kv = fork.run(lambda x: block.kv_a_proj_with_mqa(x)[0], hidden_states)
            return hidden_states, kv
        if self._down is None:
            self._down = _split_product(block.fused_qkv_a_proj, block.q_lora_rank)
        if not self._down:
            queries, kv = block.compress(hidden_states).tensor_split([block.q_lora_rank], dim=1)
            return queries, kv
        down_q, down_kv = self._down
        queries = torch.mm(hidden_states, down_q)
        return queries, fork.run(torch.mm, hidden_states, down_kv)


def _split_product(layer: Any, first_size: int) -> tuple[torch.Tensor, ...]:
    """The weight of a joint product as two, [in_features, out_features] each.

    () for a layer that is more than a product: a quantized one scales both parts together.
    """
    if not isinstance(layer.quant_method, UnquantizedLinearMethod) or layer.bias is not None:
        return ()
    weight = layer.weight.detach().as_subclass(torch.Tensor).t()
    return weight.tensor_split([first_size], dim=1)
