"""Errors of this package."""

from __future__ import annotations

from vllm_davinci.meta.errors import MetaError


class VerificationError(MetaError):
    """A run of `verify`, or a report of one, is not as it was asked for."""
