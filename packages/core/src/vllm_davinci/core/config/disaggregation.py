"""Disaggregated prefill: the NIXL connector's settings, and what it cannot be had with."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MODULE = "vllm_davinci.core.kv_transfer.connector"
NIXL = "NPUNixlConnector"
# The versions that tests have run with, as the extra `pd` has them.
TESTED_FROM, TESTED_BELOW = Version("1.5"), Version("2")
HOW_TO_GET = "Install it: pip install 'vllm-davinci[pd]'."
# A key of kv_connector_extra_config: seconds after which a transfer is given up.
TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S = "transfer_timeout", 60.0
UNSERVED_KEYS = ("bidirectional_kv_xfer",)


def settle_disaggregation(vllm_config: "VllmConfig", asked: Any) -> list[Setting]:
    """Puts our connector in place of vLLM's. Returns what it changed.

    asked: the configuration of the KV transfer, with NixlConnector in it
    Raises ConfigurationError for settings that are not served, and without the nixl package.
    """
    if asked.kv_connector_module_path == MODULE:
        return []
    _refuse(asked, vllm_config)
    _require_nixl()
    settings = [
        Setting(
            "kv_connector",
            NIXL,
            Source.RELEASE,
            f"in place of '{asked.kv_connector}': keys and values of a layer lie apart here",
        )
    ]
    if asked.kv_buffer_device != "cpu":
        settings.append(
            Setting(
                "kv_buffer_device",
                "cpu",
                Source.RELEASE,
                "pages are sent from the host: NIXL has no transport for an NPU's memory",
            )
        )
    asked.kv_connector, asked.kv_connector_module_path = NIXL, MODULE
    asked.kv_buffer_device = "cpu"
    return settings


def _refuse(asked: Any, vllm_config: "VllmConfig") -> None:
    extra, parallel = asked.kv_connector_extra_config, vllm_config.parallel_config
    model = vllm_config.model_config
    limit_s = extra.get(TRANSFER_TIMEOUT, TRANSFER_TIMEOUT_S)
    if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not limit_s > 0:
        raise ConfigurationError(
            f"{TRANSFER_TIMEOUT} of kv_connector_extra_config is {limit_s!r}: give seconds, more "
            "than 0."
        )
    refused = {
        **{f"{key} of kv_connector_extra_config": bool(extra.get(key)) for key in UNSERVED_KEYS},
        "backends other than UCX in kv_connector_extra_config": (
            extra.get("backends", ["UCX"]) != ["UCX"]
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
            f"not available in {RELEASE}: NixlConnector (--kv-transfer-config) with "
            f"{', '.join(reasons)}. Leave one out."
        )


def _require_nixl() -> None:
    try:
        found = Version(version("nixl"))
    except PackageNotFoundError:
        raise ConfigurationError(
            f"NixlConnector (--kv-transfer-config) needs the nixl package. {HOW_TO_GET}"
        ) from None
    if not TESTED_FROM <= found < TESTED_BELOW:
        raise ConfigurationError(
            f"NixlConnector (--kv-transfer-config) is tested with nixl from {TESTED_FROM} and "
            f"below {TESTED_BELOW}, and {found} is installed. {HOW_TO_GET}"
        )
