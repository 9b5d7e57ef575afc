"""vLLM's Mooncake connector for caches with separate keys and values."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)

from vllm_davinci.core.kv_transfer.mooncake_scheduler import NPUMooncakeScheduler
from vllm_davinci.core.kv_transfer.mooncake_worker import NPUMooncakeWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NPUMooncakeConnector(MooncakeConnector):
    """A prefill engine writes a prompt's blocks to the decode engine that asks for them."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None and transfer.engine_id is not None
        self.engine_id = transfer.engine_id
        self.connector_scheduler = self.connector_worker = None
        made = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NPUMooncakeScheduler(*made)
        else:
            self.connector_worker = NPUMooncakeWorker(*made)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """None, because any layout works: pages are assembled on the host."""
        return None
