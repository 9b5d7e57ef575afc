"""Finds the packages that fill core's optional roles, by entry points instead of imports."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_davinci.core.components.protocols import (
    API_VERSION,
    DeviceProvider,
    ModelProvider,
    OpProvider,
    StepCostsProvider,
    StreamScheduler,
)
from vllm_davinci.core.errors import ComponentError
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class Role:
    """A group of entry points, and a clause that says what core does without a provider."""

    group: str
    protocol: type
    package: str
    without: str


OPERATORS = Role(
    "vllm_davinci.op_providers",
    OpProvider,
    "vllm-davinci-kernels",
    "torch_npu's own operators are used",
)
MODELS = Role(
    "vllm_davinci.model_providers",
    ModelProvider,
    "vllm-davinci-models",
    "vLLM's own model definitions are used",
)
STREAMS = Role(
    "vllm_davinci.stream_schedulers",
    StreamScheduler,
    "vllm-davinci-multistream",
    "everything runs on one stream",
)
ROLES: tuple[Role, ...] = (OPERATORS, MODELS, STREAMS)
DEVICES = Role(
    "vllm_davinci.devices", DeviceProvider, "vllm-davinci-vnpu", "only real chips are seen"
)

COSTS = Role(
    "vllm_davinci.step_costs", StepCostsProvider, "vllm-davinci", "fixed rules decide how steps run"
)


def find(role: Role) -> dict[str, Any]:
    """Name -> provider for every installed provider of a role.

    Raises ComponentError for a provider that does not load, does not match the protocol, or was
    written for another version of it.
    """
    return {entry.name: _load(role, entry) for entry in entry_points(group=role.group)}


def _load(role: Role, entry: EntryPoint) -> Any:
    distribution = entry.dist
    origin = f"{distribution.name} {distribution.version}" if distribution else entry.value
    try:
        provider = entry.load()
    except Exception as error:
        raise ComponentError(
            f"{origin} provides {role.group} and does not load: {error}. Reinstall it with "
            f"`pip install --force-reinstall {role.package}`, or uninstall it."
        ) from error
    if isinstance(provider, type):
        provider = provider()
    version = getattr(provider, "api_version", None)
    if version != API_VERSION:
        raise ComponentError(
            f"{origin} is written for component API {version} and vllm-davinci-core has "
            f"{API_VERSION}. Install versions that belong together: `pip install vllm-davinci`."
        )
    if not isinstance(provider, role.protocol):
        raise ComponentError(
            f"{origin} does not implement {role.protocol.__name__}. Install versions that belong "
            "together: `pip install vllm-davinci`."
        )
    return provider


@cache
def stream_scheduler() -> StreamScheduler | None:
    """This process's stream scheduler, or None if no package provides one."""
    return next(iter(find(STREAMS).values()), None)


@cache
def step_costs_provider() -> StepCostsProvider | None:
    """The source of step-time files, or None if no package provides one."""
    return next(iter(find(COSTS).values()), None)


@cache
def _devices() -> dict[str, Any]:
    """The device providers, cached: each layer asks for them, and scanning all installed packages
    takes some 30 ms."""
    return find(DEVICES)


def active_device() -> str | None:
    """Name of the provider of this process's device, or None for a chip."""
    for name, provider in _devices().items():
        if provider.is_active():
            return name
    return None


def can_fork() -> bool:
    """True if a process forked from this one can use the device; a chip's context is lost."""
    return any(provider.is_active() and provider.can_fork() for provider in _devices().values())


def device_computes() -> bool:
    """False on a device that only models time, from which the host reads zeros."""
    return all(provider.computes() for provider in _devices().values() if provider.is_active())


def limit_host_waits(seconds: float) -> None:
    """Sets the host's timeout for a device that is not a chip, if unset."""
    for provider in _devices().values():
        if provider.is_active():
            provider.limit_host_waits(seconds)


def traced_device() -> DeviceProvider | None:
    """The provider of this process's device if it writes a trace; usually None."""
    for provider in _devices().values():
        if provider.is_active() and provider.is_traced():
            device: DeviceProvider = provider
            return device
    return None


@cache
def log_missing() -> None:
    """Logs once per process which optional components are absent and how to install them."""
    for role in ROLES:
        if not entry_points(group=role.group):
            logger.info(
                "%s is not installed: %s. `pip install %s` adds it.",
                role.package,
                role.without,
                role.package,
            )
