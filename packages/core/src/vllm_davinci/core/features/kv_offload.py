"""KV cache blocks in host memory: our connector replaces vLLM's."""

from typing import Any

from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import RELEASE, ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature

FLAG = "--kv-offloading-size"
FOLDER = "vllm_davinci.core.kv_offload"
OURS = "NPUOffloadingConnector"
# vLLM's name of a connector -> ours
CONNECTORS = {"OffloadingConnector": OURS, OURS: OURS}
OFFLOADING_SPECS = ("CPUOffloadingSpec", "NPUOffloadingSpec")
UNSERVED_KEYS = ("canonical_layout",)


def is_asked(engine: Engine) -> bool:
    """True if blocks are offloaded to host memory, by the flag or by a connector."""
    transfer = engine.vllm.kv_transfer_config
    by_connector = transfer is not None and transfer.kv_connector in CONNECTORS
    return by_connector or engine.vllm.cache_config.kv_offloading_size is not None


def settle(engine: Engine) -> None:
    """Replaces vLLM's connector by ours, before vLLM makes one from --kv-offloading-size.

    Raises ConfigurationError for unsupported values.
    """
    from vllm.config import KVTransferConfig  # vLLM imports this module first

    cache, asked = engine.vllm.cache_config, engine.vllm.kv_transfer_config
    size_gib, backend = cache.kv_offloading_size, cache.kv_offloading_backend
    if size_gib is not None:
        _check_size(size_gib, backend, asked)
        asked = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": int(size_gib * 2**30)},
        )
        engine.vllm.kv_transfer_config = asked
        cache.kv_offloading_size = None  # otherwise vLLM makes its own connector from it
    assert asked is not None
    if asked.kv_connector_module_path != f"{FOLDER}.connector":
        engine.changes.append(_replace_connector(asked))


def _check_size(size_gib: float, backend: str, asked: Any) -> None:
    if backend != "native":
        raise ConfigurationError(
            f"--kv-offloading-backend {backend} is not supported in {RELEASE}. Use native."
        )
    if size_gib <= 0:
        raise ConfigurationError(f"{FLAG} {size_gib:g}: give GiB, more than 0.")
    if asked is not None and asked.kv_connector:
        raise ConfigurationError(
            f"{FLAG} {size_gib:g} and --kv-transfer-config with {asked.kv_connector!r} both select"
            " a connector. Remove one of the two."
        )


def _replace_connector(asked: Any) -> Setting:
    extra = asked.kv_connector_extra_config
    if (spec := extra.get("spec_name", OFFLOADING_SPECS[0])) not in OFFLOADING_SPECS:
        raise ConfigurationError(
            f"--kv-transfer-config: spec_name {spec!r} in kv_connector_extra_config is not "
            f"supported in {RELEASE}. Use CPUOffloadingSpec."
        )
    if unserved := [key for key in UNSERVED_KEYS if extra.get(key)]:
        raise ConfigurationError(
            f"--kv-transfer-config: {unserved[0]} in kv_connector_extra_config is not supported in"
            f" {RELEASE}: it describes pages that hold keys and values together. Remove it."
        )
    if not extra.get("cpu_bytes_to_use"):
        raise ConfigurationError(
            "OffloadingConnector needs cpu_bytes_to_use in kv_connector_extra_config: bytes of "
            f"the host's memory for all ranks together. Or give {FLAG} GIB."
        )
    old = asked.kv_connector
    asked.kv_connector, asked.kv_connector_module_path = CONNECTORS[old], f"{FOLDER}.connector"
    extra |= {"spec_name": "NPUOffloadingSpec", "spec_module_path": f"{FOLDER}.spec"}
    reason = f"replaces '{old}': keys and values of a layer are separate here"
    return Setting("kv_connector", asked.kv_connector, Source.RELEASE, reason)


FEATURES = (
    Feature(
        FLAG,
        "KV cache blocks in host memory",
        is_asked,
        excludes={"--kv-transfer-config": "both ask for a KV connector"},
        settle=settle,
    ),
)
