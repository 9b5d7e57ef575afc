"""The planner's commands, which `vllm-davinci` finds by entry points."""

from vllm_davinci.meta.commands import Command, EngineOptions
from vllm_davinci.planner import pools
from vllm_davinci.planner.deployments import command as deployments
from vllm_davinci.planner.dry_run import command as dry_run

DRY_RUN = Command(
    "would a model fit, and how long would its steps take? No NPU needed",
    dry_run,
    EngineOptions.UNKNOWN,
)
POOLS = Command("how many engines for prefills and for decodes does a load need?", pools)
DEPLOYMENTS = Command("how are released models deployed, and would each start?", deployments)
