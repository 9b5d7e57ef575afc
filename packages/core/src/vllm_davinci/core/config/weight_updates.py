"""New weights for a running engine: what this release can take."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


HCCL_ENGINE, IPC_ENGINE = "hccl", "npu_ipc"


def refused_with_transfer(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Lists what --weight-transfer-config cannot have: name -> whether it is asked for."""
    transfer = vllm_config.weight_transfer_config
    if transfer is None:
        return {}
    reasons = _reasons_against(vllm_config)
    return {
        f"weights that a trainer sends by {transfer.backend!r} (--weight-transfer-config; "
        f'{{"backend": "{HCCL_ENGINE}"}} and {{"backend": "{IPC_ENGINE}"}} are)': (
            transfer.backend not in (HCCL_ENGINE, IPC_ENGINE)
        ),
        "weights that a trainer sends (--weight-transfer-config), because "
        f"{' and '.join(reasons)}": bool(reasons),
    }


def _reasons_against(vllm_config: "VllmConfig") -> list[str]:
    reasons = {
        "the model is quantized: what is multiplied was prepared from the old weights": (
            vllm_config.quant_config is not None
        ),
        "experts move (eplb_config.dynamic_eplb)": (
            get_config(vllm_config).eplb_config.dynamic_eplb
        ),
    }
    return [reason for reason, is_given in reasons.items() if is_given]


def refuse_new_weights(vllm_config: "VllmConfig") -> None:
    """Raises UnsupportedFeatureError, before anything is written, where they would not arrive."""
    if named := _reasons_against(vllm_config):
        raise UnsupportedFeatureError(
            f"not available in {RELEASE}: new weights for this engine, because "
            f"{' and '.join(named)}. Start the engine anew with the new checkpoint."
        )
