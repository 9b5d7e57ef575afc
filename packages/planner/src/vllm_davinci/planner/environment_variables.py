"""Every environment variable that the planner sets for processes it starts."""

DAVINCI_DRY_RUN = "DAVINCI_DRY_RUN"
"""Facts for the worker of a dry-run, as JSON: the parallel sizes that its engine does not know of,
and how rows are spread over the ranks of experts. `vllm-davinci dry-run` sets it."""
