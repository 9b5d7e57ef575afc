"""Errors of this package."""

from vllm_davinci.meta.errors import MetaError


class VerificationError(MetaError):
    """A run or a report of `verify` cannot be used as requested."""
