"""vLLM's offloading connector for caches with separate keys and values."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)


class NPUOffloadingConnector(OffloadingConnector):
    """Offloads every part of every layer's cache.

    vLLM's connector expects one tensor per layer whose blocks are whole pages. A layer here has two
    regions, the keys of all blocks and then their values (with MLA: kv_c and k_pe); vLLM's code
    would store only the first layer's keys. Row caches share one region of all layers' blocks.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Passes every region to the worker; `kv_caches` names the layers with a cache."""
        config = self._kv_cache_config
        layers = self._vllm_config.compilation_config.static_forward_context
        numbers: dict[int, int] = {}  # address of a region -> its index in `tensors`
        tensors: list[CanonicalKVCacheTensor] = []
        groups: list[list[CanonicalKVCacheRef]] = []
        for group_id in get_offloading_group_ids(config):
            refs: dict[int, CanonicalKVCacheRef] = {}
            for name in config.kv_cache_groups[group_id].layer_names:
                assert name in kv_caches, f"{name} has no cache"
                for part in layers[name].kv_cache.parts:
                    region = part.view(config.num_blocks, -1).view(torch.int8)
                    size = region.shape[1]
                    number = numbers.setdefault(region.data_ptr(), len(tensors))
                    if number == len(tensors):
                        tensors.append(CanonicalKVCacheTensor(region, size))
                    refs[number] = CanonicalKVCacheRef(number, size)
            groups.append(list(refs.values()))
        assert self.connector_worker is not None
        self.connector_worker._init_worker(CanonicalKVCaches(tensors, groups))
