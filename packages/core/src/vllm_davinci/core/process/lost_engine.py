"""The end of an engine beside which another one of the same front end is gone."""

import logging
import os
import sys

from vllm.config import ParallelConfig

from vllm_davinci.core.distributed.engine_ring import EngineRing, size_of_ring
from vllm_davinci.core.distributed.fault_channel import Fault
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.process.engine_exit import is_of_engine
from vllm_davinci.core.process.fault_report import leave_report

logger = init_logger(__name__)


def end_with_other_engines(parallel: ParallelConfig, rank: int) -> EngineRing | None:
    """Makes this process end when that of another engine does. None where nobody has to.

    rank: of this process in its engine, for which the first one speaks
    """
    if rank != 0 or size_of_ring(parallel) == 1 or not is_of_engine():
        return None
    return EngineRing(parallel, _end)


def _end(lost: Fault) -> None:
    cause = (
        f"{lost}. The server gives a part of its requests to that data-parallel engine, and would "
        "wait for their answers, so all engines end."
    )
    leave_report(cause)
    logger.error("%s", cause)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
