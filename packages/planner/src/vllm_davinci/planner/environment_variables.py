"""Every environment variable that the planner sets for its child processes."""

DAVINCI_DRY_RUN = "DAVINCI_DRY_RUN"
"""Layout of a dry-run for its worker, as JSON: the parallel sizes of the whole group, and the load
of the busiest expert rank. `vllm-davinci dry-run` sets it."""
