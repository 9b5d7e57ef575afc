"""The scheduler's side of transfers: which blocks to send, and which tokens they hold."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from vllm_davinci.core.kv_transfer.served_blocks import joined, missing_blocks, served_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
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
    inside a block, the next chunk fills the rest. The worker gets the blocks of all groups in one
    list: a block is transferred whole, whichever group it belongs to.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._served = served_blocks(kv_cache_config)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # Blocks allocated so far for each prompt that is being computed, by group.
        self._blocks_to_save: dict[str, list[list[int]]] = {}
        # Saved blocks of each request that has not finished.
        self._saved: dict[str, list[int]] = {}
        # Blocks to receive, by group; 0: none.
        self._missing: dict[str, list[list[int]]] = {}
        self._digests: dict[str, list[int]] = {}

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        _, asked, *_ = self._reqs_need_recv.get(request.request_id, (request, []))
        if any(asked):
            self._missing[request.request_id] = missing_blocks(blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        received = {name: request for name, (request, *_) in self._reqs_need_recv.items()}
        told = super().build_connector_meta(scheduler_output)
        assert isinstance(told, NixlConnectorMetadata)
        for name, missing in self._missing.items():
            if name in received:
                self._join(received[name], missing, told.reqs_to_recv[name])
        self._missing = {}
        digests_of_step, self._digests = self._digests, {}
        return NPUNixlMetadata.of(told, digests_of_step)

    def _join(self, request: "Request", missing: list[list[int]], meta: ReqMeta) -> None:
        """Joins the blocks of all groups into one list, each with the block of the other engine."""
        assert meta.remote is not None
        (there,) = meta.remote.block_ids
        here, digests = joined(self._served, request, missing)
        pairs = [each for each in zip(here, there, digests, strict=True) if each[0]]
        local, remote, self._digests[request.request_id] = map(list, zip(*pairs, strict=True))
        meta.local_block_ids = meta.local_physical_block_ids = (local,)
        meta.remote.block_ids = (remote,)
        meta.local_num_computed_blocks = (0,)

    def _build_save_meta(
        self, meta: NixlConnectorMetadata, scheduler_output: "SchedulerOutput"
    ) -> None:
        for name, new_blocks, is_resumed in yield_req_data(scheduler_output):
            request = self._reqs_need_save.get(name)
            if request is None:
                continue
            blocks = self._blocks_to_save.get(name)
            if blocks is None or is_resumed:
                blocks = self._blocks_to_save[name] = [[] for _ in self._served]
            for of_group, new in zip(blocks, new_blocks or (), strict=False):
                of_group.extend(new)
            num_computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[name]
            if num_computed < request.num_prompt_tokens:
                continue
            saved, self._digests[name] = joined(self._served, request, blocks)
            assert request.kv_transfer_params is not None
            meta.add_new_req_to_save(name, (saved,), request.kv_transfer_params)
            self._saved[name] = saved
            del self._reqs_need_save[name], self._blocks_to_save[name]

    def request_finished(
        self, request: "Request", block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._blocks_to_save.pop(request.request_id, None)
        saved = self._saved.pop(request.request_id, None)
        is_delayed, params = super().request_finished(request, block_ids)
        if params is not None and saved is not None:
            params["remote_block_ids"] = [saved]
        return is_delayed, params
