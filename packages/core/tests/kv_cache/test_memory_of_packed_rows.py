"""Rows of several kinds share one pool as vLLM plans it; no bytes of a group overlap."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_davinci.core.attention.compressed.compressor import QUANTIZED_STATE_PAGES, STATE_PAGES
from vllm_davinci.core.attention.compressed.layer import WINDOW_PAGES
from vllm_davinci.core.attention.compressed.quantized_rows import QuantizedRows
from vllm_davinci.core.attention.compressed.row_cache import RowCache, RowCacheLayer, RowKind
from vllm_davinci.core.kv_cache.memory import KVCacheMemory, runs

HEAD, INDEX, BLOCK_SIZE, MEMORY_BYTES = 64, 32, 128, 4 << 20
KINDS = {
    "window": RowKind(HEAD, torch.bfloat16, window=128, pages=4),
    "rows4": RowKind(HEAD, torch.bfloat16, tokens_per_row=4),
    "rows128": RowKind(HEAD, torch.bfloat16, tokens_per_row=128),
    "keys": RowKind(INDEX, torch.bfloat16, tokens_per_row=4),
    "states4": RowKind(4 * HEAD, torch.float32, window=8, pages=32),
    "states128": RowKind(2 * HEAD, torch.float32, window=128, pages=16),
    "states_of_keys": RowKind(4 * INDEX, torch.float32, window=8, pages=32),
}
NUM_LAYERS = 3


def planned(config: VllmConfig) -> tuple[dict[str, RowCacheLayer], KVCacheConfig]:
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.kv_cache_layout = "BLNHC"
    layers = {
        f"layers.{number}.{name}": RowCacheLayer(kind, f"layers.{number}.{name}")
        for number in range(NUM_LAYERS)
        for name, kind in KINDS.items()
    }
    specs: Any = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    groups = get_kv_cache_groups(config, specs)
    return layers, get_kv_cache_config_from_groups(config, groups, MEMORY_BYTES)


def allocated(
    config: KVCacheConfig, device: torch.device
) -> tuple[torch.Tensor, KVCacheConfig, list[int]]:
    size = config.kv_cache_tensors[0].size
    block_sizes = [BLOCK_SIZE] * len(config.kv_cache_groups)
    return torch.zeros(size, dtype=torch.int8, device=device), config, block_sizes


def rows_of(cache: RowCache, layer: RowCacheLayer, block: int, block_size: int) -> slice:
    first = cache.first_row + block * cache.rows_per_block
    return slice(first, first + block_size // layer.kind.tokens_per_row)


def test_rows_of_a_group_lie_apart_and_in_their_block(vllm_config, device):
    layers, config = planned(vllm_config)
    parts: list[torch.Tensor] = []
    memory = KVCacheMemory(device, layers, parts)
    caches: Any = memory.bind(*allocated(config, device), {})
    (pool,) = parts
    assert pool.shape[0] == config.num_blocks
    views = {(cache.rows.dtype, cache.rows.shape[1]): cache.rows for cache in caches.values()}
    for cache in caches.values():
        assert cache.rows.data_ptr() == views[cache.rows.dtype, cache.rows.shape[1]].data_ptr()
    for group in config.kv_cache_groups:
        size = group.kv_cache_spec.block_size
        for block in (0, 1, config.num_blocks - 1):
            pool.zero_()
            for name in group.layer_names:
                own = caches[name].rows[rows_of(caches[name], layers[name], block, size)]
                assert not own.any(), name  # would be an earlier layer's
                own.fill_(1)
            written = pool.any(dim=1).nonzero().flatten().tolist()
            assert written == [block]


@pytest.mark.parametrize("most_runs", [0, 64])
def test_blocks_are_copied_and_zeroed_with_the_rows_of_all_layers(
    most_runs, vllm_config, device, monkeypatch
):
    monkeypatch.setattr("vllm_davinci.core.kv_cache.memory.MOST_RUNS", most_runs)
    layers, config = planned(vllm_config)
    parts: list[torch.Tensor] = []
    memory = KVCacheMemory(device, layers, parts)
    memory.bind(*allocated(config, device), {})
    parts[0][1:7].fill_(7)
    parts[0][8].copy_(parts[0][1])  # vLLM copies blocks in the same way
    memory.zero_block_ids([6, 1, 4, 5, 4])
    of_sevens = parts[0].eq(7).all(dim=1).cpu().nonzero().flatten().tolist()
    assert of_sevens == [2, 3, 8]
    assert not parts[0][[1, 4, 5, 6]].any()


@pytest.mark.parametrize("quantizes", [False, True], ids=["floats", "int8"])
def test_a_block_of_deepseek_v4_flash_has_the_bytes_of_its_rows(quantizes, vllm_config):
    """43 layers: 21 with groups of 4, 20 with groups of 128. Windows and projections need no larger
    blocks.
    """
    vllm_config.cache_config.block_size = BLOCK_SIZE
    vllm_config.cache_config.kv_cache_layout = "BLNHC"
    half, wide = torch.bfloat16, torch.float32
    state_pages = QUANTIZED_STATE_PAGES if quantizes else STATE_PAGES[4]
    kinds = {
        "window": (43, RowKind(512, half, window=128, pages=WINDOW_PAGES)),
        "rows4": (21, RowKind(512, half, tokens_per_row=4)),
        "states4": (21, RowKind(2048, wide, window=8, pages=STATE_PAGES[4])),
        "key_states": (21, RowKind(512, wide, window=8, pages=state_pages)),
        "rows128": (20, RowKind(512, half, tokens_per_row=128)),
        "states128": (20, RowKind(1024, wide, window=128, pages=STATE_PAGES[128])),
    }
    keys = RowKind(128, half, tokens_per_row=4)
    layers = [
        RowCacheLayer(kind, f"{name}.{number}")
        for name, (count, kind) in kinds.items()
        for number in range(count)
    ]
    for number in range(21):
        if quantizes:
            cache = QuantizedRows(keys, f"keys.{number}")
            layers += [cache, cache.scales]
        else:
            layers.append(RowCacheLayer(keys, f"keys.{number}"))
    specs: Any = {layer.prefix: layer.get_kv_cache_spec(vllm_config) for layer in layers}
    config = get_kv_cache_config_from_groups(
        vllm_config, get_kv_cache_groups(vllm_config, specs), 64 << 20
    )
    of_keys = 128 + 2 if quantizes else 256
    expected = 32 * 21 * (1024 + of_keys) + 20 * 1024
    widest = kinds["states4"][1].row_bytes  # a block is a multiple of this
    strides = {each.block_stride for each in config.kv_cache_tensors}
    assert strides == {-(-expected // widest) * widest}


def test_consecutive_blocks_are_zeroed_together() -> None:
    assert runs([5, 3, 4, 9, 4]) == [slice(3, 6), slice(9, 10)]
