"""Errors that core raises. Each message says what failed, the value seen and what to do next."""

import importlib.metadata

DISTRIBUTION = "vllm-davinci-core"
# The release as messages show it; patch releases add no feature.
RELEASE = f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION).rpartition('.')[0]}"


class CoreError(Exception):
    """Base class of every error that vllm-davinci-core raises on purpose."""


class ConfigurationError(CoreError, ValueError):
    """A setting is unknown, ill-typed, contradictory or not in this release."""


class UnsupportedFeatureError(CoreError, ValueError):
    """The model or the request needs something that this release cannot compute."""


class CheckpointError(CoreError, ValueError):
    """A checkpoint's files cannot be read or do not fit the model."""


class DeviceError(CoreError, RuntimeError):
    """The device is absent, has too little memory, or lacks a requested resource."""


class RankFaultError(CoreError, RuntimeError):
    """One rank failed or ended in a step, while other ranks continued."""


class ComponentError(CoreError, RuntimeError):
    """An optional component is installed but cannot be used."""
