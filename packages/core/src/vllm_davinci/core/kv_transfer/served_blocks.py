"""The caches whose blocks can be transferred, and which blocks of a prompt are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    iter_layer_specs,
)

from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.kv_transfer.seals import prefix_digests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True)
class ServedBlocks:
    """The blocks of one cache group that a decode engine needs of a prompt.

    block_size: tokens per block
    kept:       number of last tokens that are needed; None: all
    """

    block_size: int
    kept: int | None

    def first(self, num_tokens: int) -> int:
        """Index of the first needed block."""
        return 0 if self.kept is None else max(0, num_tokens - self.kept) // self.block_size


def served_blocks(kv_cache_config: KVCacheConfig) -> list[ServedBlocks]:
    """Returns the needed blocks by cache group. Raises UnsupportedFeatureError unless one group
    caches whole contexts, or all are row caches, whose groups share blocks of one size.
    """
    specs = [
        next(iter(iter_layer_specs(each.kv_cache_spec))) for each in kv_cache_config.kv_cache_groups
    ]
    if not is_packed(kv_cache_config) and (
        len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec)
    ):
        raise UnsupportedFeatureError(
            f"--kv-transfer-config (disaggregated prefill) is not supported in {RELEASE} for a "
            "model whose layers cache different parts of the context. Remove it."
        )
    served = []
    for spec in specs:
        if isinstance(spec, SlidingWindowMLASpec):
            served.append(ServedBlocks(spec.block_size, spec.num_retained_tokens))
            continue
        if spec.block_size != BLOCK_SIZE_TOKENS:
            raise UnsupportedFeatureError(
                f"--kv-transfer-config (disaggregated prefill) is not supported in {RELEASE} with "
                f"--block-size {spec.block_size}. Use {BLOCK_SIZE_TOKENS}."
            )
        served.append(ServedBlocks(spec.block_size, None))
    return served


def joined(
    served: Sequence[ServedBlocks], request: "Request", blocks: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The blocks that a decode engine needs of a prompt, group after group, and their digests.

    Both engines get lists of the same length, although a request may have more blocks than its
    prompt fills.
    blocks: by group
    """
    found: list[int] = []
    digests: list[int] = []
    for group, of_group in zip(served, blocks, strict=True):
        told = prefix_digests(request, group.block_size)
        first = group.first(request.num_prompt_tokens)
        found += of_group[first : len(told)]
        digests += told[first:]
    return found, digests


def missing_blocks(blocks: "KVCacheBlocks") -> list[list[int]]:
    """A request's blocks by group, with 0 for blocks that hold cached tokens or no tokens."""
    return [
        [0 if each.is_null or each.block_hash is not None else each.block_id for each in group]
        for group in blocks.blocks
    ]


def is_packed(kv_cache_config: KVCacheConfig) -> bool:
    """True if all groups are row caches: a block holds the pages of all layers of one group."""
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    return any(isinstance(spec, SlidingWindowMLASpec) for spec in specs) and all(
        isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) for spec in specs
    )


def as_one_group(kv_cache_config: KVCacheConfig, block_size: int) -> KVCacheConfig:
    """Describes packed blocks as blocks of a single layer, since a block is transferred whole.

    block_size: of vLLM's configuration, which the transfer's checks compare
    """
    name = kv_cache_config.kv_cache_groups[0].layer_names[0]
    tensor = kv_cache_config.kv_cache_tensors[0]
    spec = MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=tensor.size // kv_cache_config.num_blocks // block_size,
        dtype=torch.int8,
    )
    return KVCacheConfig(kv_cache_config.num_blocks, [tensor], [KVCacheGroupSpec([name], spec)])
