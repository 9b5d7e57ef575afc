"""Errors that multistream raises."""


class MultistreamError(RuntimeError):
    """Base class of multistream's errors."""


class SplitError(MultistreamError):
    """A batch cannot be cut as asked."""
