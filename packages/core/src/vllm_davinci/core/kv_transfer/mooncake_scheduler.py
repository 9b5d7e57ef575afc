"""The scheduler's side of transfers over Mooncake: which tokens a request's blocks hold."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorScheduler,
)

from vllm_davinci.core.kv_transfer.served_blocks import joined, missing_blocks, served_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class NPUMooncakeMetadata(MooncakeConnectorMetadata):
    """vLLM's metadata, with the digests of the blocks of each request sent or received."""

    digests: dict[str, list[int]]

    @classmethod
    def of(
        cls, told: MooncakeConnectorMetadata, digests: dict[str, list[int]]
    ) -> "NPUMooncakeMetadata":
        made = cls()
        made.__dict__ |= {**vars(told), "digests": digests}
        return made


class NPUMooncakeScheduler(MooncakeConnectorScheduler):
    """Sends and requests only blocks that hold needed tokens of the prompt.

    A request may have more blocks, for drafted or generated tokens. vLLM pairs the last blocks of
    both engines, so one extra block on either side would misplace all of them. The null block (0)
    stands for blocks that the decode engine has.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._served = served_blocks(kv_cache_config)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._digests: dict[str, list[int]] = {}

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = request.request_id
        _, asked = self._reqs_need_recv.get(name, (request, []))
        if not any(asked):
            return
        found, digests = joined(self._served, request, missing_blocks(blocks))
        if len(self._served) == 1:  # the missing blocks are the last ones
            first = found.count(0)
            found, digests = found[first:], digests[first:]
        self._digests[name] = digests
        self._reqs_need_recv[name] = (request, [found])

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        told = super().request_finished(request, block_ids)
        name = request.request_id
        _, sent = self._reqs_need_send.get(name, (request, []))
        if any(sent):
            found, self._digests[name] = joined(self._served, request, block_ids)
            self._reqs_need_send[name] = (request, [found])
        return told

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        told = super().build_connector_meta(scheduler_output)
        assert isinstance(told, MooncakeConnectorMetadata)
        digests_of_step, self._digests = self._digests, {}
        return NPUMooncakeMetadata.of(told, digests_of_step)
