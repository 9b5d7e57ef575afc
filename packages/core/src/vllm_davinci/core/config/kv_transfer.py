"""KV connectors: ours in place of vLLM's, which know CUDA's devices and layouts."""

from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.disaggregation import CARRIERS, settle_disaggregation
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FOLDER = "vllm_davinci.core.kv_offload"
OFFLOADING = "NPUOffloadingConnector"
# connector as users of vLLM name it -> ours
CONNECTORS = {"OffloadingConnector": OFFLOADING, OFFLOADING: OFFLOADING}
OFFLOADING_SPECS = ("CPUOffloadingSpec", "NPUOffloadingSpec")
UNSERVED_KEYS = ("canonical_layout",)


def settle_kv_transfer(vllm_config: "VllmConfig") -> list[Setting]:
    """Replaces vLLM's connectors by ours. Returns what it changed.

    To be called before vLLM makes a connector of --kv-offloading-size.
    Raises ConfigurationError for connectors and keys that are not served.
    """
    from vllm.config import KVTransferConfig  # vLLM imports this module first

    cache = vllm_config.cache_config
    size_gib, backend = cache.kv_offloading_size, cache.kv_offloading_backend
    asked = vllm_config.kv_transfer_config
    if size_gib is not None:
        _refuse_offload(size_gib, backend, asked)
        asked = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": int(size_gib * 2**30)},
        )
        vllm_config.kv_transfer_config = asked
        cache.kv_offloading_size = None  # else vLLM makes its own connector of it
    if asked is None or not asked.kv_connector:
        return []
    if asked.kv_connector in CARRIERS:
        return settle_disaggregation(vllm_config, asked)
    if asked.kv_connector not in CONNECTORS:
        raise ConfigurationError(
            f"not available in {RELEASE}: the KV connector {asked.kv_connector!r} "
            "(--kv-transfer-config); OffloadingConnector is, which keeps blocks on the host, and "
            "NixlConnector and MooncakeConnector, which take them from another engine. Start "
            "without it."
        )
    if asked.kv_connector_module_path == f"{FOLDER}.connector":
        return []
    return _replace_connector(asked)


def _refuse_offload(size_gib: float, backend: str, asked: Any) -> None:
    if backend != "native":
        raise ConfigurationError(
            f"not available in {RELEASE}: --kv-offloading-backend {backend}; native is."
        )
    if size_gib <= 0:
        raise ConfigurationError(f"--kv-offloading-size {size_gib:g}: give GiB, more than 0.")
    if asked is not None and asked.kv_connector:
        raise ConfigurationError(
            f"--kv-offloading-size {size_gib:g} and --kv-transfer-config with "
            f"{asked.kv_connector!r} ask for two connectors. Leave one out."
        )


def _replace_connector(asked: Any) -> list[Setting]:
    extra = asked.kv_connector_extra_config
    if (spec := extra.get("spec_name", OFFLOADING_SPECS[0])) not in OFFLOADING_SPECS:
        raise ConfigurationError(
            f"not available in {RELEASE}: the offloading specification {spec!r} (spec_name of "
            "kv_connector_extra_config); CPUOffloadingSpec is."
        )
    if unserved := [key for key in UNSERVED_KEYS if extra.get(key)]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {unserved[0]} of kv_connector_extra_config, which "
            "describes pages that hold keys and values together. Leave it out."
        )
    if not extra.get("cpu_bytes_to_use"):
        raise ConfigurationError(
            "OffloadingConnector needs cpu_bytes_to_use in kv_connector_extra_config: bytes of "
            "the host's memory for all ranks together. Or give --kv-offloading-size GIB."
        )
    old = asked.kv_connector
    asked.kv_connector = CONNECTORS[old]
    asked.kv_connector_module_path = f"{FOLDER}.connector"
    extra |= {"spec_name": "NPUOffloadingSpec", "spec_module_path": f"{FOLDER}.spec"}
    return [
        Setting(
            "kv_connector",
            asked.kv_connector,
            Source.RELEASE,
            f"in place of '{old}': keys and values of a layer lie apart here",
        )
    ]
