"""Errors of this package."""

from vllm_davinci.meta.errors import MetaError


class DryRunError(MetaError):
    """A dry-run is impossible with these options."""


class DeploymentError(MetaError):
    """The table of deployments lacks a row, or has an invalid one."""
