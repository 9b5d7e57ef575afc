"""Errors of this package."""


class MultistreamError(RuntimeError):
    """Base class of multistream's errors."""


class CostsError(MultistreamError):
    """The given step times are not valid."""


class SplitError(MultistreamError):
    """A batch cannot be split as requested."""
