"""A worker's side of transfers over Mooncake: pages on the host, with checksums."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch_npu
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorMetadata,
    MooncakeConnectorWorker,
    PullReqMeta,
    TransferEngine,
)

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.kv_transfer.carriers import MOONCAKE, TRANSFER_TIMEOUT
from vllm_davinci.core.kv_transfer.host_pages import HostPages, are_sealed, store_sealed
from vllm_davinci.core.kv_transfer.mooncake_scheduler import NPUMooncakeMetadata
from vllm_davinci.core.kv_transfer.served_blocks import as_one_group, is_packed
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class NPUMooncakeWorker(MooncakeConnectorWorker):
    """Writes host pages into the host pages of the engine that requests them.

    The writer does not know whether the request still waits: the page that it writes may by then
    belong to another request. So the receiver verifies a page's checksum after the copy to the
    device. Until then only the request owns the blocks, and nothing reads them.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        if TransferEngine is None:
            raise ConfigurationError(
                f"MooncakeConnector: the package does not load. {MOONCAKE.how_to_get}"
            )
        if is_packed(kv_cache_config):
            block_size = vllm_config.cache_config.block_size
            kv_cache_config = as_one_group(kv_cache_config, block_size)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._layers = vllm_config.compilation_config.static_forward_context
        self._pages: list[HostPages] = []
        self._receiving: dict[str, tuple[PullReqMeta, list[int]]] = {}
        self._limit_s = float(
            transfer.get_from_extra_config(
                TRANSFER_TIMEOUT, envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
            )
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers host pages of the layers in `kv_caches`; layers that share a cache have none"""
        pages = {
            name: HostPages(self._layers[name].kv_cache.parts, self.kv_cache_config.num_blocks)
            for name in kv_caches
            if name in self._layer_specs
        }
        self._pages = list(pages.values())
        super().register_kv_caches({name: each.rows for name, each in pages.items()})

    def start_load_kv(self, metadata: MooncakeConnectorMetadata) -> None:
        assert isinstance(metadata, NPUMooncakeMetadata)
        self._save(metadata)
        for asked in metadata.reqs_to_recv.values():
            for name, meta in asked.items():
                # Without own blocks, the request only releases blocks of the other engine.
                if any(meta.local_block_ids):
                    self._receiving[name] = meta, metadata.digests[name]
        super().start_load_kv(metadata)

    # --- sending ---------------------------------------------------------------------------------

    def _save(self, metadata: NPUMooncakeMetadata) -> None:
        """Copies finished prompts to the host with checksums, and waits for it."""
        saved = {
            name: blocks[0] for name, (_, blocks) in metadata.reqs_to_send.items() if any(blocks)
        }
        store_sealed(self._pages, saved, metadata.digests)

    async def record_send_reqs(self, metadata: MooncakeConnectorMetadata) -> None:
        """vLLM's method; also wakes engines that wait for dropped prompts."""
        metadata.reqs_not_processed &= self.reqs_need_send.keys()  # others were never to be sent
        given_up = [self.reqs_need_send[name] for name in metadata.reqs_not_processed]
        await super().record_send_reqs(metadata)
        for meta in given_up:
            meta.ready.set()

    # --- receiving -------------------------------------------------------------------------------

    def get_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """vLLM's method. Received pages are then on the device, or their blocks reported as
        failed."""
        sent, received = super().get_finished()
        come = {name: self._receiving.pop(name) for name in received or ()}
        whole = {name: each for name, each in come.items() if not each[0].failed}
        for meta, _ in whole.values():
            for pages in self._pages:
                pages.load([block for block in meta.local_block_ids[0] if block])
        if whole:
            torch_npu.npu.current_stream().synchronize()
        for name, (meta, digests) in whole.items():
            pairs = zip(meta.local_block_ids[0], digests, strict=True)
            blocks, expected = zip(*(each for each in pairs if each[0]), strict=True)
            if not are_sealed(self._pages, blocks, expected):
                logger.warning(
                    "checksum mismatch: pages for %s have other tokens, or were overwritten", name
                )
                self.xfer_stats.record_failed_recv()
                self._invalid_block_ids.put(set(blocks))
        return sent, received

    def receive_kv(self, remote_engine_id: str, pull_metas: dict[str, PullReqMeta]) -> None:
        ranks = self._tp_size[remote_engine_id]
        if ranks != self.tp_size:
            self._handle_failed_recv(
                pull_metas,
                list(pull_metas),
                f"the prefill engine has --tensor-parallel-size {ranks}, and this one "
                f"{self.tp_size}: start both with the same",
            )
            return
        super().receive_kv(remote_engine_id, pull_metas)

    async def handle_new_engine_id(
        self, remote_engine_id: str, pull_metas: dict[str, PullReqMeta]
    ) -> None:
        """vLLM's method, with a timeout. A late result serves the next request."""
        asks = asyncio.create_task(super().handle_new_engine_id(remote_engine_id, pull_metas))
        if not (await asyncio.wait({asks}, timeout=self._limit_s))[0]:
            self._handle_failed_recv(pull_metas, list(pull_metas), self._late)

    async def receive_kv_from_single_worker(
        self, worker_addr: str, pull_metas: dict[str, PullReqMeta]
    ) -> None:
        """vLLM's method, but does not wait for an ended worker, as vLLM does."""
        receives = asyncio.create_task(
            super().receive_kv_from_single_worker(worker_addr, pull_metas)
        )
        ends = asyncio.create_task(_end_of(worker_addr))
        try:
            done, _ = await asyncio.wait(
                {receives, ends}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            receives.cancel()
            ends.cancel()
        if receives in done:
            return
        why = self._late if not done else "the prefill engine has ended"
        # Both engines have the same number of ranks: each receives from one worker.
        unanswered = [name for name, meta in pull_metas.items() if meta.pull_tasks_count > 0]
        self._handle_failed_recv(pull_metas, unanswered, why)

    @property
    def _late(self) -> str:
        return f"timed out after {self._limit_s:g} s"

    def _handle_failed_recv(
        self, pull_metas: dict[str, PullReqMeta], req_ids: Collection[str], reason: str
    ) -> None:
        """vLLM's method; also looks up the other engine's workers again, which may be new."""
        engines = {pull_metas[name].remote_engine_id for name in req_ids if name in pull_metas}
        super()._handle_failed_recv(pull_metas, req_ids, reason)
        for engine in engines:
            self._remote_agents.pop(engine, None)


async def _end_of(worker_addr: str) -> None:
    """Returns when nothing listens at the address any more. ZeroMQ would reconnect and wait."""
    place = urlsplit(worker_addr)
    while True:
        try:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
        except OSError:
            return
        with suppress(OSError):
            await reader.read()  # also ends if ZeroMQ closes a silent connection
        writer.close()
