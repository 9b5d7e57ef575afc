"""Errors of this package."""

from __future__ import annotations

from vllm_davinci.meta.errors import MetaError


class DryRunError(MetaError):
    """A dry-run is impossible as it was asked for."""


class DeploymentError(MetaError):
    """The table of deployments has no such row, or a row that is not as it should be."""
