"""Errors of this package."""

from __future__ import annotations


class MetaError(Exception):
    """Base class of this package's errors."""


class UnsupportedVersionError(MetaError):
    """torch, torch_npu, vLLM or Python has a version that this release was not made for."""


class DeviceLibraryError(MetaError, ImportError):
    """torch_npu is about to be imported and the dynamic loader finds no CANN."""


class ExplanationError(MetaError):
    """The engine or the step that was described is impossible."""


class ServerError(MetaError):
    """A server does not answer, or its answer is not the one asked for."""


class ModelFileError(MetaError):
    """A local model cannot be read, converted, or held by this host."""
