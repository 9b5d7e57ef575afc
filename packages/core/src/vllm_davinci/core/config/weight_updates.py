"""New weights for a running engine: what this release can take."""

from typing import TYPE_CHECKING

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_new_weights(vllm_config: "VllmConfig") -> None:
    """Raises UnsupportedFeatureError, before anything is written, where they would not arrive."""
    reasons = {
        "the model is quantized: what is multiplied was prepared from the old weights": (
            vllm_config.quant_config is not None
        ),
        "layers take adapters (--enable-lora)": vllm_config.lora_config is not None,
        "experts have moved (eplb_config.dynamic_eplb)": vllm_config.parallel_config.enable_eplb,
    }
    named = [reason for reason, is_given in reasons.items() if is_given]
    if named:
        raise UnsupportedFeatureError(
            f"not available in {RELEASE}: new weights for this engine, because "
            f"{' and '.join(named)}. Start the engine anew with the new checkpoint."
        )
