"""Disaggregated prefill: our connectors replace vLLM's; incompatible features."""

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature
from vllm_davinci.core.features.kv_offload import CONNECTORS
from vllm_davinci.core.kv_transfer.carriers import (
    CARRIERS,
    MOONCAKE,
    NIXL,
    PROTOCOL,
    TRANSFER_TIMEOUT,
    TRANSFER_TIMEOUT_S,
    Carrier,
)

FLAG = "--kv-transfer-config"


def settle(engine: Engine) -> None:
    """Replaces vLLM's connector by ours.

    Raises ConfigurationError for an invalid timeout, or if the connector's package is missing.
    """
    asked = engine.vllm.kv_transfer_config
    if asked is None or not asked.kv_connector:
        return
    carrier = CARRIERS[asked.kv_connector]
    _settle_types(engine, asked.kv_role)
    if asked.kv_connector_module_path == carrier.module:
        return
    limit_s = asked.kv_connector_extra_config.get(TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S)
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not limit_s > 0:
        raise ConfigurationError(
            f"{TRANSFER_TIMEOUT} of kv_connector_extra_config is {limit_s!r}: give seconds, more "
            "than 0."
        )
    _require_package(carrier)
    _note(
        engine,
        "kv_connector",
        carrier.connector,
        f"replaces '{asked.kv_connector}': keys and values of a layer are separate here",
    )
    asked.kv_connector, asked.kv_connector_module_path = carrier.connector, carrier.module
    if carrier is NIXL and asked.kv_buffer_device != "cpu":
        asked.kv_buffer_device = "cpu"
        why = "pages are sent from the host: NIXL has no transport for an NPU's memory"
        _note(engine, "kv_buffer_device", "cpu", why)
    if carrier is MOONCAKE and not asked.kv_connector_extra_config.get(PROTOCOL):
        asked.kv_connector_extra_config[PROTOCOL] = "tcp"
        _note(engine, PROTOCOL, "tcp", "pages are sent from the host; vLLM's default is rdma")


def _note(engine: Engine, key: str, value: str, reason: str) -> None:
    engine.changes.append(Setting(key, value, Source.RELEASE, reason))


def _settle_types(engine: Engine, role: str | None) -> None:
    settle_types = getattr(engine.vllm.quant_config, "settle_for_decodes", None)  # our class
    if role == "kv_consumer" and settle_types is not None and settle_types():
        why = "this engine only decodes (kv_role 'kv_consumer')"
        _note(engine, "type of W8A8_MIX layers", "W8A8", why)


def _require_package(carrier: Carrier) -> None:
    name = carrier.names[0]
    found = _installed(carrier.packages)
    if found is None:
        raise ConfigurationError(
            f"{name} ({FLAG}) needs the {carrier.packages[0]} package. {carrier.how_to_get}"
        )
    if not carrier.tested_from <= found < carrier.tested_below:
        raise ConfigurationError(
            f"{name} ({FLAG}) is tested with {carrier.packages[0]} from {carrier.tested_from} and "
            f"below {carrier.tested_below}; {found} is installed. {carrier.how_to_get}"
        )


def _installed(packages: Sequence[str]) -> Version | None:
    for package in packages:
        try:
            return Version(version(package))
        except PackageNotFoundError:
            continue
    return None


def is_asked(engine: Engine) -> bool:
    """True if blocks are exchanged with another engine."""
    asked = engine.vllm.kv_transfer_config
    return asked is not None and asked.kv_connector not in CONNECTORS


def _carrier(engine: Engine) -> Carrier | None:
    return CARRIERS.get(engine.vllm.kv_transfer_config.kv_connector) if is_asked(engine) else None


def _extra(engine: Engine) -> dict[str, Any]:
    extra: dict[str, Any] = engine.vllm.kv_transfer_config.kv_connector_extra_config
    return extra


def _unserved_keys(engine: Engine) -> list[str]:
    carrier = _carrier(engine)
    return [] if carrier is None else [key for key in carrier.unserved if _extra(engine).get(key)]


def _refused(
    part: str,
    title: str,
    is_given: Callable[[Engine], bool],
    instead: str,
    as_given: Callable[[Engine], str] | None = None,
) -> Feature:
    """A value of vLLM's KVTransferConfig that is not served."""
    return Feature(
        f"{part} of {FLAG}",
        title,
        lambda engine: is_asked(engine) and is_given(engine),
        is_served=False,
        instead=instead,
        as_given=as_given,
    )


FEATURES = (
    Feature(
        FLAG,
        "disaggregated prefill",
        is_asked,
        excludes=dict.fromkeys(
            (
                "--enable-lora",
                "--pipeline-parallel-size",
                "--data-parallel-size",
                "--enable-prompt-embeds",
            ),
            "",
        )
        | {"images, videos or sound": "--language-model-only turns them off"},
        settle=settle,
    ),
    _refused(
        "kv_connector",
        "another KV connector",
        lambda e: (
            bool(e.vllm.kv_transfer_config.kv_connector)
            and e.vllm.kv_transfer_config.kv_connector not in CARRIERS
        ),
        "Use OffloadingConnector, which offloads blocks to the host, or NixlConnector or "
        "MooncakeConnector, which transfer them from another engine.",
        lambda e: f"{FLAG} with kv_connector {e.vllm.kv_transfer_config.kv_connector!r}",
    ),
    _refused(
        "kv_connector_extra_config",
        "exchange in both directions",
        lambda e: bool(_unserved_keys(e)),
        "Remove the key.",
        lambda e: f"{FLAG} with {', '.join(_unserved_keys(e))} of kv_connector_extra_config",
    ),
    _refused(
        "backends",
        "backends of NIXL other than UCX",
        lambda e: _carrier(e) is NIXL and _extra(e).get("backends", ["UCX"]) != ["UCX"],
        "Remove the key from kv_connector_extra_config.",
    ),
    _refused(
        PROTOCOL,
        "another protocol of Mooncake",
        lambda e: _carrier(e) is MOONCAKE and (_extra(e).get(PROTOCOL) or "tcp") != "tcp",
        "Use 'tcp'.",
        lambda e: f"{FLAG} with {PROTOCOL} {_extra(e)[PROTOCOL]!r}",
    ),
    _refused(
        "enable_permute_local_kv",
        "a permuted local cache",
        lambda e: e.vllm.kv_transfer_config.enable_permute_local_kv,
        "Remove it.",
    ),
)
