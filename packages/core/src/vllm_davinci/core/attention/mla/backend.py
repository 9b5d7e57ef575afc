"""The attention backend of layers with a latent cache."""

from typing import Any

from vllm.v1.attention.backend import AttentionImplBase, AttentionMetadataBuilder, AttentionType

from vllm_davinci.core.attention.backend import NPUAttentionBackend

# What the fused attention operator takes for the compressed keys, and so what a row of the cache
# holds. Source: the operator's documentation, constraints of query_rope and key_rope.
LATENT_SIZE = 512
ROTARY_SIZE = 64


class NPUMLABackend(NPUAttentionBackend):
    """Multi-head MLA over a paged cache of latent and rotary rows."""

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        from vllm_davinci.core.attention.mla.attention import (
            LatentAttention,  # torch_npu: worker only
        )

        return LatentAttention

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadataBuilder

        return NPUMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT_SIZE + ROTARY_SIZE]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER
