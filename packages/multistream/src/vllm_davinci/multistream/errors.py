"""Errors that multistream raises."""


class MultistreamError(RuntimeError):
    """Base class of multistream's errors."""


class CostsError(MultistreamError):
    """What is said to be the costs of steps cannot be."""


class SplitError(MultistreamError):
    """A batch cannot be cut as asked."""
