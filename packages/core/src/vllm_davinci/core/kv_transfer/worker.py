"""A worker's side of transfers: host pages with checksums, verified on receipt."""

import time
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper

from vllm_davinci.core.errors import ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.kv_transfer.carriers import NIXL, TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S
from vllm_davinci.core.kv_transfer.host_pages import HostPages, are_sealed, store_sealed
from vllm_davinci.core.kv_transfer.late_transfers import LateTransfers
from vllm_davinci.core.kv_transfer.scheduler import NPUNixlMetadata
from vllm_davinci.core.kv_transfer.served_blocks import as_one_group, is_packed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NPUNixlWorker(NixlPullConnectorWorker):
    """Sends from host pages and receives into them.

    Pages hold a block's keys and values together, as vLLM's transfers expect; on the device they
    are separate.
    """

    def __init__(
        self, vllm_config: "VllmConfig", engine_id: str, kv_cache_config: "KVCacheConfig"
    ) -> None:
        if NixlWrapper is None:
            raise ConfigurationError(
                f"NixlConnector: the nixl package does not load. {NIXL.how_to_get}"
            )
        if is_packed(kv_cache_config):
            block_size = vllm_config.cache_config.block_size
            kv_cache_config = as_one_group(kv_cache_config, block_size)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._pages: list[HostPages] = []
        self._loaded = torch_npu.npu.Event()
        self._digests: dict[str, list[int]] = {}
        self._begun: dict[str, float] = {}
        self._late = LateTransfers(self.nixl_wrapper)
        self._limit_s = float(
            self.kv_transfer_config.get_from_extra_config(TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S)
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers host pages of the layers in `kv_caches`; layers that share a cache have none"""
        super().register_kv_caches({name: kv_caches[name] for name in self._layer_specs})

    def initialize_host_xfer_buffer(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self.kv_cache_config.num_blocks
        pages = {name: HostPages(self._layers[name].kv_cache.parts, blocks) for name in kv_caches}
        self._pages = list(pages.values())
        self.host_xfer_buffers = {name: each.rows for name, each in pages.items()}

    # --- sending ---------------------------------------------------------------------------------

    def save_kv_to_host(self, metadata: NixlConnectorMetadata) -> None:
        """Copies this step's finished prompts to the host with checksums, and waits for it."""
        assert isinstance(metadata, NPUNixlMetadata)
        saved = {name: meta.local_block_ids[0] for name, meta in metadata.reqs_to_save.items()}
        store_sealed(self._pages, saved, metadata.digests)

    # --- receiving -------------------------------------------------------------------------------

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        assert isinstance(metadata, NPUNixlMetadata)
        if metadata.reqs_to_recv or not self._ready_requests.empty():
            # Receiving may overwrite pages that an earlier copy still reads.
            self._loaded.synchronize()
            self._digests = {
                name: digests
                for name, digests in (self._digests | metadata.digests).items()
                if name in self._recving_metadata or name in metadata.reqs_to_recv
            }
        super().start_load_kv(metadata)

    def sync_recved_kv_to_device(self, req_id: str, meta: ReqMeta) -> None:
        """Starts copying received pages to the device; later work on the stream waits for it."""
        for pages in self._pages:
            pages.load(meta.local_block_ids[0])
        self._loaded.record()

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        if self._late.blocks() & {block for group in meta.local_block_ids for block in group}:
            # A transfer that timed out may still write to these pages.
            self._handle_failed_transfer(
                req_id, None, self._recv_failures, record_failed_transfer=False
            )
            return
        super()._read_blocks_for_req(req_id, meta)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """vLLM's method; reports transfers as failed if they timed out or received other tokens.

        A failed request is computed again or answered with an error (kv_load_failure_policy).
        """
        self._late.drop_ended()
        late = self._give_up_late(transfers)
        done, failed = super()._pop_done_transfers(transfers)
        failed |= late
        for name in done:
            self._begun.pop(name, None)
            digests = self._digests.pop(name, [])
            meta = self._recving_metadata[name]
            if name in failed | self._recv_failures or self._is_sealed(meta, digests):
                continue
            self._log_failure(
                "checksum mismatch", name, "The other engine had reassigned these blocks"
            )
            self.xfer_stats.record_failed_transfer()
            failed.add(name)
        return done, failed

    def _is_sealed(self, meta: ReqMeta, digests: list[int]) -> bool:
        blocks = meta.local_block_ids[0] if meta.local_block_ids else []
        return not blocks or are_sealed(self._pages, blocks, digests)

    def _give_up_late(self, transfers: dict[str, list[int]]) -> set[str]:
        """Drops transfers that timed out. Returns the names of their requests."""
        now = time.monotonic()
        late = set()
        for name, handles in transfers.items():
            if handles and now - self._begun.setdefault(name, now) >= self._limit_s:
                late.add(name)
                self._log_failure("late", name, f"Timed out after {self._limit_s:g} s")
                self.xfer_stats.record_failed_transfer()
                blocks = self._recving_metadata[name].local_block_ids[0]
                self._late.add(handles, blocks)
                transfers[name] = []
        return late

    def shutdown(self) -> None:
        if hasattr(self, "_late"):  # otherwise its start has failed
            self._late.release()
        super().shutdown()

    # --- the other engine ------------------------------------------------------------------------

    def _validate_remote_agent_handshake(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_size: int, *args: Any, **kwargs: Any
    ) -> None:
        if remote_tp_size != self.world_size:
            raise UnsupportedFeatureError(
                f"The prefill engine has --tensor-parallel-size {remote_tp_size}, and this one "
                f"{self.world_size}: start both with the same."
            )
        super()._validate_remote_agent_handshake(nixl_agent_meta, remote_tp_size, *args, **kwargs)
