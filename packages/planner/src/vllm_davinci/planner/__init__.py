"""Plans deployments without an NPU: memory, modelled step times, pool sizes."""

from vllm_davinci.planner.errors import DeploymentError, DryRunError

__all__ = ["DeploymentError", "DryRunError"]
