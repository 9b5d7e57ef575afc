"""Errors of this package."""


class MetaError(Exception):
    """Base class of this package's errors."""


class UnsupportedVersionError(MetaError):
    """The version of torch, torch_npu, vLLM or Python is not supported by this release."""


class DeviceLibraryError(MetaError, ImportError):
    """torch_npu is about to be imported, but the dynamic loader finds no CANN."""


class ExplanationError(MetaError):
    """The engine or the step that was described is impossible."""


class ServerError(MetaError):
    """A server does not answer, or gives an unexpected answer."""


class ModelFileError(MetaError):
    """A local model cannot be read or converted, or does not fit this host's memory."""
