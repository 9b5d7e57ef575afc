"""Rotary position embeddings: one launch for query and key together."""

import torch
import torch_npu
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import (
    DynamicNTKAlphaRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import (
    DynamicNTKScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op

# Constraints of npu_mrope on the head size and on the number of rotated entries, by bytes per
# element. Source: the operator's documentation, head_size and rotary_dim.
SIZE_MULTIPLE = {4: 16, 2: 32}
# Rotation by one position per token. Passed explicitly, because npu_mrope reads its own default
# after that is freed: `value_or(at::IntArrayRef{0, 0, 0})` in op-plugin's
# RopeWithSinCosCacheKernelNpuOpApi.cpp.
PLAIN = [0, 0, 0]


class NPURotaryEmbedding(RotaryEmbedding):
    """Rotates the first `rotary_dim` entries of every head, with vLLM's cos and sin."""

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates query and key by their positions.

        positions: [num_tokens], int64
        query:     [num_tokens, num_heads * head_size]
        key:       [num_tokens, num_kv_heads * head_size], or None
        Returns new tensors of the same shapes.
        """
        if (
            key is None
            or query.ndim != 2
            or positions.ndim != 1
            or self.rotary_dim % SIZE_MULTIPLE[query.element_size()]
            or self.head_size % SIZE_MULTIPLE[query.element_size()]
            or query.shape[0] == 0
        ):
            return self.forward_native(positions, query, key)
        table = self._match_cos_sin_cache_dtype(query)
        if rotate := fused_op(operators.rotary_embedding):
            return rotate(
                positions=positions,
                query=query,
                key=key,
                cos_sin_cache=table,
                head_size=self.head_size,
                is_neox_style=self.is_neox_style,
            )
        return torch_npu.npu_mrope(
            positions,
            query,
            key,
            table,
            self.head_size,
            mrope_section=PLAIN,
            rotary_mode="half" if self.is_neox_style else "interleave",
        )


# vLLM replaces a layer by the class registered under the layer's own class name, so each scaling
# variant needs its own class, although it differs only in filling the cache of cos and sin.
VARIANTS: dict[str, type[RotaryEmbedding]] = {
    variant.__name__: type(f"NPU{variant.__name__}", (NPURotaryEmbedding, variant), {})
    for variant in (
        LinearScalingRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        DynamicNTKAlphaRotaryEmbedding,
        NTKScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
        YaRNScalingRotaryEmbedding,
    )
}
