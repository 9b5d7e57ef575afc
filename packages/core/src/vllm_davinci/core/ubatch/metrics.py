"""Overlap decisions on their way from the workers to the server's metrics endpoint.

vLLM's worker output has no room for them. The first worker of each DP rank writes its counts to a
file of prometheus_client, as processes of one server do that share an endpoint. The file lies in a
directory that only the server's user may enter, and the server removes it when it ends.
"""

import os
import shutil
import stat
import weakref
from pathlib import Path
from typing import Any

import vllm.envs as envs
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_davinci.core.config.parsing import get_config, is_resolved
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.spec_decode.acceptance import AcceptanceWatch
from vllm_davinci.core.ubatch.decisions import Counts

logger = init_logger(__name__)

# Set by vLLM where several API servers share one endpoint, whose processes then read every file.
SHARED_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
# Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
METRIC = "davinci:overlap_decisions"
HELP = "Steps by the reason why they were split into ubatches or were not."


def _own_directory(vllm_config: VllmConfig) -> Path:
    """The directory of one server, among vLLM's own files between its processes."""
    return Path(envs.VLLM_RPC_BASE_PATH) / f"vllm-davinci-{vllm_config.instance_id}"


def _is_private(directory: Path) -> bool:
    """Whether only this process's user can have written there. Raises FileNotFoundError."""
    status = directory.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & 0o077


class CountWriter:
    """A worker's end. Does nothing while no server reads."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        shared = os.environ.get(SHARED_DIRECTORY)
        self._directory = Path(shared) if shared else _own_directory(vllm_config)
        self._is_shared = bool(shared)
        self._engine = str(vllm_config.parallel_config.data_parallel_index)
        self._file: MmapedDict | None = None
        self._written: Counts = {}

    def __call__(self, counts: Counts) -> None:
        if self._file is None:
            self._file = self._open()
        if self._file is None:
            return
        for reason, count in counts.items():
            if self._written.get(reason) != count:
                labels = [self._engine, reason]
                key = mmap_key(METRIC, f"{METRIC}_total", ["engine", "reason"], labels, HELP)
                self._file.write_value(key, count, 0.0)  # type: ignore[no-untyped-call]
                self._written[reason] = count

    def _open(self) -> MmapedDict | None:
        # Not the name that prometheus_client gives this process's own counters.
        name = f"counter_overlap-{self._engine}-{os.getpid()}.db"
        try:
            if self._is_shared or _is_private(self._directory):
                path = str(self._directory / name)
                file = MmapedDict(path)  # type: ignore[no-untyped-call]
                weakref.finalize(self, file.close)
                return file
        except FileNotFoundError:
            return None  # no server yet, or none on this host
        logger.warning_once(
            "%s is not this user's alone: overlap decisions are not in the server's metrics. "
            "Remove it and start the server again.",
            self._directory,
        )
        return None


class OverlapStatLogger(AggregateStatLoggerBase):
    """Shows overlap decisions among the server's metrics. vLLM finds it by its entry point.

    It is the only one that vLLM takes from this plugin, so it watches drafts, too.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._acceptance = AcceptanceWatch()
        if not is_resolved(vllm_config):
            return  # installed beside another platform
        if not get_config(vllm_config).dbo.enabled or os.environ.get(SHARED_DIRECTORY):
            return
        directory = _own_directory(vllm_config)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            logger.warning(
                "Overlap decisions are not in this server's metrics: %s is there already. Remove "
                "it when no other server uses it.",
                directory,
            )
            return
        collector = MultiProcessCollector(REGISTRY, directory)  # type: ignore[no-untyped-call]
        self.close = weakref.finalize(self, _remove, collector, directory)  # at exit, too

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Watches drafts. Overlap decisions are read when the endpoint is asked."""
        if scheduler_stats is not None:
            self._acceptance.record(scheduler_stats.spec_decoding_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _remove(collector: MultiProcessCollector, directory: Path) -> None:
    REGISTRY.unregister(collector)
    shutil.rmtree(directory, ignore_errors=True)
