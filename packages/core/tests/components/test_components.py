"""Optional components are found by entry point, and refused if they do not fit."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from vllm_davinci.core import components
from vllm_davinci.core.components import providers
from vllm_davinci.core.errors import ComponentError

ROLE = components.ROLES[0]


class Kernels:
    api_version = components.API_VERSION

    def supported_ops(self) -> frozenset[str]:
        return frozenset({"rms_norm"})

    def load(self, name: str) -> object:
        return name


class KernelsOfAnotherVersion(Kernels):
    api_version = components.API_VERSION + 1


class Device:
    api_version = components.API_VERSION

    def is_active(self) -> bool:
        return True

    def can_fork(self) -> bool:
        return True

    def computes(self) -> bool:
        return True

    def is_traced(self) -> bool:
        return False

    def name_stream(self, handle: int, name: str) -> None: ...

    def limit_host_waits(self, seconds: float) -> None: ...

    def label_launches(self, label: str) -> None: ...


class IdleDevice(Device):
    def is_active(self) -> bool:
        return False


class TracedDevice(Device):
    def is_traced(self) -> bool:
        return True


class IdleTracedDevice(TracedDevice):
    def is_active(self) -> bool:
        return False


class NoKernels:
    api_version = components.API_VERSION


def installed(monkeypatch: pytest.MonkeyPatch, *names: str, role: components.Role = ROLE) -> None:
    entries = EntryPoints(EntryPoint(name, f"{__name__}:{name}", role.group) for name in names)
    monkeypatch.setattr(providers, "entry_points", lambda group: entries.select(group=group))
    # Installed packages do not change within a process, so they are looked up once.
    monkeypatch.setattr(providers, "_devices", lambda: components.find(components.DEVICES))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets entry points load this file, under pytest's module name."""
    module = ModuleType(__name__)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


def test_no_provider_gives_an_empty_result(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch)
    assert components.find(ROLE) == {}


def test_a_provider_is_found_by_name(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, "Kernels")
    found = components.find(ROLE)
    assert found["Kernels"].supported_ops() == {"rms_norm"}


def test_another_api_version_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, "KernelsOfAnotherVersion")
    with pytest.raises(ComponentError, match="component API 2 and vllm-davinci-core has 1"):
        components.find(ROLE)


def test_a_provider_without_the_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, "NoKernels")
    with pytest.raises(ComponentError, match="does not implement OpProvider"):
        components.find(ROLE)


def test_a_provider_that_does_not_load_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, "missing_name")
    with pytest.raises(ComponentError, match=r"does not load: .*missing_name"):
        components.find(ROLE)


def test_missing_components_are_reported_once_with_the_install_command(monkeypatch):
    installed(monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr(providers.logger, "info", lambda text, *values: lines.append(text % values))
    components.log_missing.cache_clear()
    components.log_missing()
    components.log_missing()
    assert len(lines) == len(components.ROLES)
    for line, role in zip(lines, components.ROLES, strict=True):
        assert f"`pip install {role.package}`" in line


@pytest.mark.parametrize(
    ("names", "active"), [((), None), (("IdleDevice",), None), (("IdleDevice", "Device"), "Device")]
)
def test_the_active_device_is_named(names, active, monkeypatch):
    installed(monkeypatch, *names, role=components.DEVICES)
    assert components.active_device() == active


def test_devices_are_looked_for_once(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []
    monkeypatch.setattr(providers, "entry_points", lambda group: looked.append(group) or ())
    providers._devices.cache_clear()
    try:
        assert components.device_computes() and components.device_computes()
        assert looked == [components.DEVICES.group]
    finally:
        providers._devices.cache_clear()


def test_only_an_active_device_with_a_trace_gets_stream_names(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, "Device", "IdleTracedDevice", role=components.DEVICES)
    assert components.traced_device() is None
    installed(monkeypatch, "Device", "TracedDevice", role=components.DEVICES)
    assert isinstance(components.traced_device(), TracedDevice)
