"""Errors that multistream raises."""


class MultistreamError(RuntimeError):
    """Base class of multistream's errors."""


class SplitError(MultistreamError):
    """A batch cannot be cut as asked."""


class MicroBatchAborted(MultistreamError):
    """Unwinds a micro-batch because another one of the same step failed. Never reaches the caller."""
