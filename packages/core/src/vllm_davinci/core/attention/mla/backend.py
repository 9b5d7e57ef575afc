"""The attention backend of MLA layers."""

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionImplBase, AttentionMetadataBuilder, AttentionType

from vllm_davinci.core.attention.backend import NPUAttentionBackend
from vllm_davinci.core.attention.mla.sizes import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from vllm_davinci.core.attention.stripes import divides_context


class NPUMLABackend(NPUAttentionBackend):
    """MLA over a paged cache of kv_c and k_pe rows."""

    masks_more: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        from vllm_davinci.core.attention.mla.impl import NPUMLAImpl  # torch_npu: worker only
        from vllm_davinci.core.attention.mla.striped import NPUStripedMLAImpl

        return NPUStripedMLAImpl if divides_context() else NPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadataBuilder

        return NPUMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [KV_LORA_RANK + QK_ROPE_HEAD_DIM]

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


class NPUSparseMLABackend(NPUMLABackend):
    """MLA over chosen tokens of the cache, whose rows also hold an indexer's key."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadataBuilder

        return SparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True
