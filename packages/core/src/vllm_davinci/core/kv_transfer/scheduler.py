"""The scheduler's side of transfers: which blocks to send, and which tokens they hold."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.kv_transfer.seals import prefix_digests
from vllm_davinci.core.kv_transfer.served_blocks import require_served_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class NPUNixlMetadata(NixlConnectorMetadata):
    """vLLM's metadata, with the digests of the blocks of each request sent or received."""

    digests: dict[str, list[int]]

    @classmethod
    def of(cls, told: NixlConnectorMetadata, digests: dict[str, list[int]]) -> "NPUNixlMetadata":
        made = cls()
        made.__dict__ |= {**vars(told), "digests": digests}
        return made


class NPUNixlScheduler(NixlPullConnectorScheduler):
    """Sends a prompt's blocks when its last token is computed.

    vLLM sends each block with the chunk of the prompt for which it was allocated. If a chunk ends
    inside a block, the next chunk fills the rest.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        require_served_blocks(kv_cache_config)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # Blocks so far of each prompt being computed here.
        self._blocks_to_save: dict[str, list[int]] = {}
        self._digests: dict[str, list[int]] = {}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        for name, (request, blocks, num_cached, _) in self._reqs_need_recv.items():
            if any(blocks):
                start = num_cached[0]
                digests = prefix_digests(request, BLOCK_SIZE_TOKENS)
                self._digests[name] = digests[start : start + len(blocks[0])]
        told = super().build_connector_meta(scheduler_output)
        assert isinstance(told, NixlConnectorMetadata)
        digests_of_step, self._digests = self._digests, {}
        return NPUNixlMetadata.of(told, digests_of_step)

    def _build_save_meta(
        self, meta: NixlConnectorMetadata, scheduler_output: "SchedulerOutput"
    ) -> None:
        for name, new_blocks, is_resumed in yield_req_data(scheduler_output):
            request = self._reqs_need_save.get(name)
            if request is None:
                continue
            blocks = self._blocks_to_save.setdefault(name, [])
            if is_resumed:
                blocks.clear()
            blocks.extend(new_blocks[0] if new_blocks else ())
            num_computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[name]
            if num_computed < request.num_prompt_tokens:
                continue
            digests = prefix_digests(request, BLOCK_SIZE_TOKENS)
            assert request.kv_transfer_params is not None
            meta.add_new_req_to_save(name, (blocks[: len(digests)],), request.kv_transfer_params)
            self._digests[name] = digests
            del self._reqs_need_save[name], self._blocks_to_save[name]

    def request_finished(
        self, request: "Request", block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._blocks_to_save.pop(request.request_id, None)
        return super().request_finished(request, block_ids)
