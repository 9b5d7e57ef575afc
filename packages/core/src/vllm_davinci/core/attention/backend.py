"""The attention backend and the shape of its paged cache."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_davinci.core.attention.stripes import divides_context
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS


class LayersOwnBackendBase(AttentionBackend):
    """Backend of a cache group whose layers compute attention themselves."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        raise NotImplementedError("The layers of this cache have their own attention.")


class NPUAttentionBackend(AttentionBackend):
    """Paged attention over separate key and value caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True
    masks_more: ClassVar[bool] = True
    """True if the implementation also supports sliding windows, sinks and bidirectional images."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [BLOCK_SIZE_TOKENS]

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up in its own enumeration of backends.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        from vllm_davinci.core.attention.paged import NPUAttentionImpl  # torch_npu: worker only
        from vllm_davinci.core.attention.striped import NPUStripedAttentionImpl

        return NPUStripedAttentionImpl if divides_context() else NPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from vllm_davinci.core.attention.metadata import NPUAttentionMetadataBuilder

        return NPUAttentionMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        # Each layer's region is contiguous, so it can hold all keys, then all values.
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return cls.masks_more

    @classmethod
    def supports_sink(cls) -> bool:
        return cls.masks_more

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return cls.masks_more

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True
