"""New weights for a running engine, from a trainer or from files."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.registered_names import HCCL_ENGINE, IPC_ENGINE
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.features.feature import Engine, Feature, refused

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FLAG = "--weight-transfer-config"
_ENGINES = (HCCL_ENGINE, IPC_ENGINE)

# Features that make new weights impossible, whether a trainer sends them or files have them.
_EXCLUDED = {
    "--quantization": "weights prepared at loading would keep the old values",
    "eplb_config.dynamic_eplb": "experts move",
}


def refuse_new_weights(vllm_config: "VllmConfig") -> None:
    """Raises UnsupportedFeatureError, before writing a weight, if new weights would have no
    effect."""
    reasons = []
    if vllm_config.quant_config is not None:
        reasons.append(f"the model is quantized: {_EXCLUDED['--quantization']}")
    if get_config(vllm_config).eplb_config.dynamic_eplb:
        reasons.append("experts move (eplb_config.dynamic_eplb)")
    if reasons:
        raise UnsupportedFeatureError(
            f"New weights are not supported for this engine in {RELEASE}, because "
            f"{' and '.join(reasons)}. Restart the engine with the new checkpoint."
        )


def _backend(engine: Engine) -> str | None:
    asked = engine.vllm.weight_transfer_config
    return None if asked is None else asked.backend


FEATURES = (
    Feature(
        FLAG, "weights sent by a trainer", lambda e: _backend(e) is not None, excludes=_EXCLUDED
    ),
    refused(
        f"{FLAG} with another backend",
        "weights sent by a trainer",
        lambda e: _backend(e) not in (None, *_ENGINES),
        as_given=lambda e: f"{FLAG} with backend {_backend(e)!r}",
        instead=f'Use {{"backend": "{HCCL_ENGINE}"}} or {{"backend": "{IPC_ENGINE}"}}.',
    ),
)
