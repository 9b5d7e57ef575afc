"""Errors that the Python side of vnpu raises."""


class VirtualDeviceError(RuntimeError):
    """Base class of vnpu's errors."""


class TraceError(VirtualDeviceError):
    """A trace cannot be read or written."""


class ActivationError(VirtualDeviceError):
    """The virtual NPU cannot be activated in this process or environment."""


class MachineError(VirtualDeviceError):
    """A chip or topology of the timing model is unknown, or its file is not valid."""
