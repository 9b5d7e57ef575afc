"""Plans of deployments without an NPU: memory, modelled times of steps, sizes of pools."""

from vllm_davinci.planner.errors import DeploymentError, DryRunError

__all__ = ["DeploymentError", "DryRunError"]
