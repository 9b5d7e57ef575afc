"""The base of the attention backends' metadata builders."""

from __future__ import annotations

from typing import TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec

Metadata = TypeVar("Metadata")


class MetadataBuilderBase(AttentionMetadataBuilder[Metadata]):
    """Calls `prepare` at the end of the constructor, which is abstract in vLLM."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prepare()

    def prepare(self) -> None:
        """Sets the builder's own attributes."""
