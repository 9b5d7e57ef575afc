"""Exports overlap decisions from the workers to the server's metrics endpoint.

The first worker of each DP rank writes its counts, see core.components.worker_metrics.
"""

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_davinci.core.components.worker_metrics import SHARED_DIRECTORY, MetricsFile, own_directory
from vllm_davinci.core.config.parsing import get_config, is_resolved
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.decisions import Counts

DRAFTS = 1000


class AcceptanceWatch:
    """Warns once if none of the first drafts of an engine has been accepted.

    The text is then right, but each step takes longer. vLLM reports the acceptance rate only among
    other statistics.
    """

    def __init__(self) -> None:
        self._drafts = self._accepted = 0

    def record(self, stats: Any) -> None:
        """Adds a step's counts. stats: vLLM's SpecDecodingStats, or None"""
        if stats is None or self._accepted or self._drafts >= DRAFTS:
            return
        self._drafts += stats.num_drafts
        self._accepted += stats.num_accepted_tokens
        if self._drafts >= DRAFTS and not self._accepted:
            logger.warning(
                "Speculative decoding: none of %d drafts was accepted. The text is right, but "
                "drafting only costs time. Usual causes: the drafter was made for another model "
                "or another quantization of it, its weights are not trained, or the text has no "
                "repetitions for ngram. Check --speculative-config, or start without it.",
                self._drafts,
            )


logger = init_logger(__name__)

# Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
METRIC = "davinci:overlap_decisions"
HELP = "Steps by the reason why they were or were not split into ubatches."


class CountWriter:
    """A worker's writer. Does nothing while no server reads."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._file = MetricsFile(vllm_config, "counter_overlap")
        self._written: Counts = {}

    def __call__(self, counts: Counts) -> None:
        if not self._file.is_read():
            return
        for reason, count in counts.items():
            if self._written.get(reason) != count:
                self._file.write(METRIC, f"{METRIC}_total", {"reason": reason}, count, HELP)
                self._written[reason] = count


class OverlapStatLogger(AggregateStatLoggerBase):
    """Adds overlap decisions to the server's metrics. vLLM finds it by its entry point.

    vLLM uses only one such logger of this plugin, so it also watches drafts and exports expert
    balance.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._acceptance = AcceptanceWatch()
        if not is_resolved(vllm_config):
            return  # installed together with another platform
        config = get_config(vllm_config)
        has_files = config.dbo.enabled or config.eplb_config.dynamic_eplb
        if not has_files or os.environ.get(SHARED_DIRECTORY):
            return
        directory = own_directory(vllm_config)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            logger.warning(
                "Overlap decisions and expert balance are not in this server's metrics: %s "
                "already exists. Remove it when no other server uses it.",
                directory,
            )
            return
        collector = MultiProcessCollector(REGISTRY, directory)  # type: ignore[no-untyped-call]
        self.close = weakref.finalize(self, _remove, collector, directory)  # also called at exit

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Watches drafts. Overlap decisions are read on each request to the endpoint."""
        if scheduler_stats is not None:
            self._acceptance.record(scheduler_stats.spec_decoding_stats)

    def log_engine_initialized(self) -> None:
        """Does nothing: there is no such message."""


def _remove(collector: MultiProcessCollector, directory: Path) -> None:
    REGISTRY.unregister(collector)
    shutil.rmtree(directory, ignore_errors=True)
