"""vLLM's NIXL connector for caches with separate keys and values."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)

from vllm_davinci.core.kv_transfer.scheduler import NPUNixlScheduler
from vllm_davinci.core.kv_transfer.worker import NPUNixlWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NPUNixlConnector(NixlPullConnector):
    """A decode engine reads its prompts' blocks from the engine that computed them."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        made = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NPUNixlScheduler(*made)
        else:
            self.connector_worker = NPUNixlWorker(*made)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """None, because any layout works: pages are assembled on the host."""
        return None
