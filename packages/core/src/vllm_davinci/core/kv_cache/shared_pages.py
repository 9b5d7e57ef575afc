"""Contiguous blocks of keys and values, for hybrid models (recurrent state).

vLLM gives cache groups the same memory: block i of a layer's region holds keys and values, or a
request's recurrent state, depending on the group it is assigned to. So a block's data must lie
within that block's page.

    page:                  | keys of the block            | its values                   |
    as operators' blocks:  | b*2k | b*2k + 1 | ... (k)    | b*2k + k | ...               |

The operators take two addresses, of keys and of values, and one block table. Here both addresses
are in the same region, and the values' address is k operator blocks later. So number b * 2k + j
means the j-th part of the block's keys from one address, and of its values from the other. See
docs/decisions/0014-pages-of-states.md.

MLA's kv_c and k_pe rows differ in size, so no common block number addresses both in one page. They
stay two parts of the region, and a state is stored in the bytes of its block in both.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec, MLAAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.attention.paged_cache import PagedCache

# Page slots per token: one for its keys and one for its values.
SLOTS_PER_KEY = 2


def has_pages(kv_cache_config: KVCacheConfig) -> bool:
    """True if blocks are contiguous: some layers have recurrent state and none has MLA's rows."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return any(isinstance(each, MambaSpec) for each in specs) and not any(
        isinstance(each, MLAAttentionSpec) for each in specs
    )


def latent_sizes(layers: Iterable[Any]) -> tuple[int, ...] | None:
    """Entries per row in each part of a model's MLA caches; None without MLA."""
    found = {
        (layer.kv_lora_rank, layer.qk_rope_head_dim)
        for layer in layers
        if hasattr(layer, "kv_lora_rank")
    }
    assert len(found) <= 1, found
    return found.pop() if found else None


def state_parts(
    region: torch.Tensor, page_size: int, of_latents: tuple[int, ...] | None
) -> list[torch.Tensor]:
    """Memory of each block's states: [num_blocks, words of 4 bytes] each.

    region:     [num_blocks * page_size], in bytes
    of_latents: result of `latent_sizes` for the layers that share the memory
    """
    words = region.view(torch.float32)
    if of_latents is None:
        return [words.view(-1, page_size // 4)]
    num_blocks, row = region.numel() // page_size, sum(of_latents)
    sizes = [words.numel() // row * size for size in of_latents]
    return [part.view(num_blocks, -1) for part in words.split(sizes)]


def paged_cache_in_pages(
    region: torch.Tensor, spec: AttentionSpec, operator_block_size: int
) -> PagedCache:
    """The cache of an attention layer whose pages each hold keys, then values.

    region: [num_blocks * page size], in bytes
    """
    blocks = region.view(spec.dtype).view(
        -1, operator_block_size, spec.num_kv_heads, spec.head_size
    )
    per_page = spec.block_size // operator_block_size
    return PagedCache.of(blocks[:-per_page], blocks[per_page:])


def address_pages(
    kv_cache_config: KVCacheConfig,
    groups: Iterable[Sequence[AttentionGroup]],
    num_requests: int,
    num_tokens: int,
) -> None:
    """Makes vLLM's block tables count operator blocks, if the cache has shared pages.

    groups:       block tables' groups, one per cache group
    num_requests: most requests of a step
    num_tokens:   most tokens of a request
    """
    if not has_pages(kv_cache_config):
        return
    for group in chain.from_iterable(groups):
        spec = group.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            continue
        if group.kernel_block_size is None:  # a vLLM block is one operator block
            device = group.get_metadata_builder().device
            group.kernel_block_size = spec.block_size
            width = -(-num_tokens // spec.block_size)
            group.kernel_block_table = torch.zeros(
                len(group.metadata_builders), num_requests, width, dtype=torch.int32, device=device
            )
            group.kernel_block_offsets = torch.zeros(1, dtype=torch.int32, device=device)
        per_block = spec.block_size // group.kernel_block_size
        group.kernel_block_stride = SLOTS_PER_KEY * per_block
