"""One worker, in this process, that takes itself for rank 0 of the whole group."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_davinci.core.worker import NPUWorker
from vllm_davinci.meta.dry_run import phantom_group


class PhantomExecutor(UniProcExecutor):
    """Chosen with --distributed-executor-backend by its name.

    scheduled: tokens of each request in the newest step, by request
    """

    scheduled: dict[str, int]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.scheduled = dict(scheduler_output.num_scheduled_tokens)
        return super().execute_model(scheduler_output, non_block)


class PhantomWorker(NPUWorker):
    """Chosen with --worker-cls by its name."""

    def init_device(self) -> None:
        phantom_group.start(self.parallel_config.world_size)
        super().init_device()
