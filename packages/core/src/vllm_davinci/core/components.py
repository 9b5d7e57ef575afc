"""Roles that optional packages fill, and how core finds them: entry points, never imports."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from vllm_davinci.core.errors import ComponentError
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.stream_scheduler import StreamScheduler

logger = init_logger(__name__)

# Version of the protocols below. A provider states the one it was written for.
API_VERSION = 1


@runtime_checkable
class OpProvider(Protocol):
    """Compiled operators that take the place of torch_npu's."""

    api_version: int

    def supported_ops(self) -> frozenset[str]:
        """Names of the operators this provider has on this device."""

    def load(self, name: str) -> Any:
        """The function of one operator."""


@runtime_checkable
class ModelProvider(Protocol):
    """Model definitions that take the place of vLLM's."""

    api_version: int

    def models(self) -> Mapping[str, str]:
        """Architecture -> class path, as vLLM's ModelRegistry takes it."""

    def divides_tokens(self) -> frozenset[str]:
        """Architectures whose definition divides a step's tokens among tensor-parallel ranks."""


@runtime_checkable
class DeviceProvider(Protocol):
    """A device other than a chip, which computes on this host's threads."""

    api_version: int

    def is_active(self) -> bool:
        """Whether this process runs on it."""

    def is_traced(self) -> bool:
        """Whether it writes down which task runs when on which stream."""

    def name_stream(self, handle: int, name: str) -> None:
        """In that trace, the stream with this native handle has this name."""

    def label_launches(self, label: str) -> None:
        """In that trace, tasks launched from now on carry this label; "" ends it."""


@dataclass(frozen=True)
class Role:
    """A group of entry points, and what core does without it."""

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


def find(role: Role) -> dict[str, Any]:
    """Name -> provider for every installed provider of a role.

    Raises ComponentError for one that does not load, does not fit the protocol, or was written
    for another version of it.
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
            f"{origin} does not have what {role.protocol.__name__} asks for. Install versions "
            "that belong together: `pip install vllm-davinci`."
        )
    return provider


@cache
def stream_scheduler() -> StreamScheduler | None:
    """This process's stream scheduler, or None when no package provides one."""
    return next(iter(find(STREAMS).values()), None)


def active_device() -> str | None:
    """Name of the provider whose device this process runs on, or None for a chip."""
    for name, provider in find(DEVICES).items():
        if provider.is_active():
            return name
    return None


def traced_device() -> DeviceProvider | None:
    """The provider whose device this process runs on and which writes a trace; usually None."""
    for provider in find(DEVICES).values():
        if provider.is_active() and provider.is_traced():
            device: DeviceProvider = provider
            return device
    return None


@cache
def log_missing() -> None:
    """Says once per process which optional components are absent, and how to get them."""
    for role in ROLES:
        if not entry_points(group=role.group):
            logger.info(
                "%s is not installed: %s. `pip install %s` adds it.",
                role.package,
                role.without,
                role.package,
            )
