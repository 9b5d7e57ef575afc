"""Errors that multistream raises."""


class MultistreamError(RuntimeError):
    """Base class of multistream's errors."""


class CostsError(MultistreamError):
    """The costs that are given for steps are impossible."""


class SplitError(MultistreamError):
    """A batch cannot be cut as asked."""
