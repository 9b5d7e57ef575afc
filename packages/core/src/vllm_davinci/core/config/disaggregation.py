"""Disaggregated prefill: the connectors' settings, and what they cannot be had with."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Carrier:
    """A library that carries blocks from engine to engine, and our connector that uses it.

    names:        connectors of vLLM that ours takes the place of; users say the first
    connector:    ours
    module:       where it is
    packages:     that bring the library; one of them is enough
    tested_from, tested_below: versions that tests have run with, as the extra has them
    how_to_get:   told where it is missing
    unserved:     keys of kv_connector_extra_config that ask for what is not served
    """

    names: tuple[str, ...]
    connector: str
    module: str
    packages: tuple[str, ...]
    tested_from: Version
    tested_below: Version
    how_to_get: str
    unserved: tuple[str, ...] = ()


NIXL = Carrier(
    names=("NixlConnector", "NixlPullConnector"),  # the first is vLLM's other name of the second
    connector="NPUNixlConnector",
    module="vllm_davinci.core.kv_transfer.connector",
    packages=("nixl",),
    tested_from=Version("1.5"),
    tested_below=Version("2"),
    how_to_get="Install it: pip install 'vllm-davinci[pd]'.",
    unserved=("bidirectional_kv_xfer",),
)
MOONCAKE = Carrier(
    names=("MooncakeConnector",),
    connector="NPUMooncakeConnector",
    module="vllm_davinci.core.kv_transfer.mooncake_connector",
    packages=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    tested_from=Version("0.3.13"),
    tested_below=Version("0.4"),
    how_to_get="Install it: pip install 'vllm-davinci[mooncake]', and the system's libibverbs.so.1 "
    "(Debian's package libibverbs1), without which it does not load.",
)
CARRIERS = {
    name: carrier for carrier in (NIXL, MOONCAKE) for name in (*carrier.names, carrier.connector)
}
# A key of kv_connector_extra_config: seconds after which a transfer is given up.
TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S = "transfer_timeout", 60.0
PROTOCOL = "mooncake_protocol"


def settle_disaggregation(vllm_config: "VllmConfig", asked: Any) -> list[Setting]:
    """Puts our connector in place of vLLM's. Returns what it changed.

    asked: the configuration of the KV transfer, with a connector of CARRIERS in it
    Raises ConfigurationError for settings that are not served, and without the carrier's package.
    """
    carrier = CARRIERS[asked.kv_connector]
    settings = _settle_types(vllm_config.quant_config, asked.kv_role)
    if asked.kv_connector_module_path == carrier.module:
        return settings
    _refuse(asked, vllm_config, carrier)
    _require_package(carrier)
    settings.append(
        Setting(
            "kv_connector",
            carrier.connector,
            Source.RELEASE,
            f"in place of '{asked.kv_connector}': keys and values of a layer lie apart here",
        )
    )
    asked.kv_connector, asked.kv_connector_module_path = carrier.connector, carrier.module
    settings += _send_from_host(asked) if carrier is NIXL else _carry_by_tcp(asked)
    return settings


def _settle_types(quantization: Any, role: str | None) -> list[Setting]:
    settle = getattr(quantization, "settle_for_decodes", None)  # ours
    if role != "kv_consumer" or settle is None or not settle():
        return []
    why = "this engine only decodes (kv_role 'kv_consumer')"
    return [Setting("type of W8A8_MIX layers", "W8A8", Source.RELEASE, why)]


def _send_from_host(asked: Any) -> list[Setting]:
    if asked.kv_buffer_device == "cpu":
        return []
    asked.kv_buffer_device = "cpu"
    why = "pages are sent from the host: NIXL has no transport for an NPU's memory"
    return [Setting("kv_buffer_device", "cpu", Source.RELEASE, why)]


def _carry_by_tcp(asked: Any) -> list[Setting]:
    if asked.kv_connector_extra_config.get(PROTOCOL):
        return []
    asked.kv_connector_extra_config[PROTOCOL] = "tcp"
    why = "pages are sent from the host; vLLM's default is rdma"
    return [Setting(PROTOCOL, "tcp", Source.RELEASE, why)]


def _refuse(asked: Any, vllm_config: "VllmConfig", carrier: Carrier) -> None:
    extra, parallel = asked.kv_connector_extra_config, vllm_config.parallel_config
    model = vllm_config.model_config
    limit_s = extra.get(TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S)
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not limit_s > 0:
        raise ConfigurationError(
            f"{TRANSFER_TIMEOUT} of kv_connector_extra_config is {limit_s!r}: give seconds, more "
            "than 0."
        )
    protocol = extra.get(PROTOCOL) or "tcp"
    refused = {
        **{f"{key} of kv_connector_extra_config": bool(extra.get(key)) for key in carrier.unserved},
        "backends other than UCX in kv_connector_extra_config": (
            carrier is NIXL and extra.get("backends", ["UCX"]) != ["UCX"]
        ),
        f"{PROTOCOL} {protocol!r} of kv_connector_extra_config, where 'tcp' is": (
            carrier is MOONCAKE and protocol != "tcp"
        ),
        "enable_permute_local_kv": asked.enable_permute_local_kv,
        "--enable-lora": vllm_config.lora_config is not None,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "a multimodal model": model is not None and model.is_multimodal_model,
        "--enable-prompt-embeds": model is not None and model.enable_prompt_embeds,
    }
    if reasons := [why for why, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {carrier.names[0]} (--kv-transfer-config) with "
            f"{', '.join(reasons)}. Leave one out."
        )


def _require_package(carrier: Carrier) -> None:
    name = carrier.names[0]
    found = _installed(carrier.packages)
    if found is None:
        raise ConfigurationError(
            f"{name} (--kv-transfer-config) needs the {carrier.packages[0]} package. "
            f"{carrier.how_to_get}"
        )
    if not carrier.tested_from <= found < carrier.tested_below:
        raise ConfigurationError(
            f"{name} (--kv-transfer-config) is tested with {carrier.packages[0]} from "
            f"{carrier.tested_from} and below {carrier.tested_below}, and {found} is installed. "
            f"{carrier.how_to_get}"
        )


def _installed(packages: Sequence[str]) -> Version | None:
    for package in packages:
        try:
            return Version(version(package))
        except PackageNotFoundError:
            continue
    return None
