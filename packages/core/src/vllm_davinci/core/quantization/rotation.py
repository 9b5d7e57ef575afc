"""Hidden states that an export has rotated (QuaRot), as a model's drafter meets them.

ModelSlim multiplies the residual stream by an orthogonal matrix Q, and folds each norm's weight
into the layer after it, the last norm's into the head. A layer for further tokens is rotated
likewise, and takes what the last norm leaves: without that norm's weight. Exports say so
(`is_rot_used`), and have a matrix that multiplies it in, `rot.weight` = Q^T diag(weight) Q.
"""

from typing import Any

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

# Methods whose heads read hidden states of the model that they were trained beside.
READ_STATES = ("eagle", "eagle3")
ROTATION = "rot.weight"


def has_rotation(quantization: Any) -> bool:
    """Whether the checkpoint has the matrix. quantization: vLLM's quantization config, or None"""
    options = getattr(getattr(quantization, "format", None), "options", None) or {}
    return bool(options.get("is_rot_used"))


def refuse_heads_of_rotated_models(method: str | None, quantization: Any) -> None:
    """Raises UnsupportedFeatureError where a head would read states that it has never seen.

    method: of --speculative-config, or None; quantization: vLLM's quantization config, or None
    """
    options = getattr(getattr(quantization, "format", None), "options", None) or {}
    optional = options.get("optional")
    is_rotated = has_rotation(quantization) or bool(
        isinstance(optional, dict) and optional.get("quarot")
    )
    if method in READ_STATES and is_rotated:
        raise UnsupportedFeatureError(
            f"not available in {RELEASE}: speculative decoding of method {method!r} for a model "
            "whose export has rotated its hidden states (quarot in its description), which the "
            "head was not trained on. Use 'mtp', 'ngram' or 'draft_model', or an export that is "
            "not rotated."
        )
