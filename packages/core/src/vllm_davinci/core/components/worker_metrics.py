"""Passes workers' metrics to the server's metrics endpoint.

vLLM's worker output has no field for them. A worker writes them to a file of prometheus_client's
multiprocess mode, in a directory that only the server's user may enter. The server removes it at
its end.
"""

import os
import stat
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import vllm.envs as envs
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from vllm.config import VllmConfig

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# vLLM sets it if several API servers share one endpoint; each then reads every file.
SHARED_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def own_directory(vllm_config: VllmConfig) -> Path:
    """The directory of one server, next to vLLM's own files for its processes."""
    return Path(envs.VLLM_RPC_BASE_PATH) / f"vllm-davinci-{vllm_config.instance_id}"


def _is_private(directory: Path) -> bool:
    """True if only this process's user can have written there. Raises FileNotFoundError."""
    status = directory.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & 0o077


class MetricsFile:
    """A worker's file of one kind of metrics.

    kind: prefix of the file's name, from which prometheus_client knows how to merge files:
          counter_NAME, or gauge_MODE_NAME
    """

    def __init__(self, vllm_config: VllmConfig, kind: str) -> None:
        shared = os.environ.get(SHARED_DIRECTORY)
        self._directory = Path(shared) if shared else own_directory(vllm_config)
        self._is_shared = bool(shared)
        self._engine = str(vllm_config.parallel_config.data_parallel_index)
        self._kind = kind
        self._file: MmapedDict | None = None
        self._is_lost = False

    def is_read(self) -> bool:
        """True if a server reads the file; False after a write has failed."""
        if self._file is None and not self._is_lost:
            self._file = self._open()
        return self._file is not None

    def write(
        self, metric: str, name: str, labels: Mapping[str, str], value: float, meaning: str
    ) -> None:
        """Sets a value if the file is read.

        metric, name: a counter's name ends with _total, its metric's does not
        labels:       in addition to the engine's number
        """
        if self._is_lost:
            return
        assert self._file is not None, "ask is_read first"
        key = mmap_key(metric, name, ["engine", *labels], [self._engine, *labels.values()], meaning)
        try:
            self._file.write_value(key, value, time.time())  # type: ignore[no-untyped-call]
        except OSError as error:
            self._lose(error)

    def _open(self) -> MmapedDict | None:
        # Differs from the file name that prometheus_client gives this process's own metrics.
        name = f"{self._kind}-{self._engine}-{os.getpid()}.db"
        try:
            if self._is_shared or _is_private(self._directory):
                path = str(self._directory / name)
                file = MmapedDict(path)  # type: ignore[no-untyped-call]
                weakref.finalize(self, file.close)
                return file
        except FileNotFoundError:
            return None  # no server yet, or none on this host
        except OSError as error:
            self._lose(error)
            return None
        logger.warning_once(
            "%s may be written by other users: overlap decisions and expert balance are not in "
            "the server's metrics. Remove it and start the server again.",
            self._directory,
        )
        return None

    def _lose(self, error: OSError) -> None:
        """Continues without the file: a step must not fail because of a metric."""
        self._file, self._is_lost = None, True
        logger.warning(
            "Overlap decisions and expert balance of this worker are no longer in the server's "
            "metrics: %s. Free disk space or raise the limit of open files, and start the server "
            "again.",
            error,
        )
