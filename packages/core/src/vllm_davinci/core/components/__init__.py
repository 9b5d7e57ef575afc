"""Roles that optional packages fill, and how core finds them."""

from vllm_davinci.core.components.protocols import (
    API_VERSION,
    DeviceProvider,
    ModelProvider,
    OpProvider,
    StreamScheduler,
)
from vllm_davinci.core.components.providers import (
    DEVICES,
    MODELS,
    OPERATORS,
    ROLES,
    STREAMS,
    Role,
    active_device,
    can_fork,
    device_computes,
    find,
    limit_host_waits,
    log_missing,
    stream_scheduler,
    traced_device,
)

__all__ = [
    "API_VERSION",
    "DEVICES",
    "MODELS",
    "OPERATORS",
    "ROLES",
    "STREAMS",
    "DeviceProvider",
    "ModelProvider",
    "OpProvider",
    "Role",
    "StreamScheduler",
    "active_device",
    "can_fork",
    "device_computes",
    "find",
    "limit_host_waits",
    "log_missing",
    "stream_scheduler",
    "traced_device",
]
