"""Hidden states rotated by an export (QuaRot), and their effect on drafters.

ModelSlim multiplies the residual stream by an orthogonal matrix Q, and folds each norm's weight
into the layer after it, the last norm's into the head. A multi-token prediction layer is rotated
likewise, and its input is the last norm's output without the norm's weight. Exports state this
(`is_rot_used`) and contain a matrix that applies the weight, `rot.weight` = Q^T diag(weight) Q.
"""

from typing import Any

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError

# Methods whose heads read hidden states of the model that they were trained with.
READ_STATES = ("eagle", "eagle3")
ROTATION = "rot.weight"


def has_rotation(quantization: Any) -> bool:
    """True if the checkpoint has the matrix. quantization: vLLM's quantization config, or None"""
    options = getattr(getattr(quantization, "format", None), "options", None) or {}
    return bool(options.get("is_rot_used"))


def refuse_heads_of_rotated_models(method: str | None, quantization: Any) -> None:
    """Raises UnsupportedFeatureError if a head would read rotated states, unlike in its training.

    method: of --speculative-config, or None; quantization: vLLM's quantization config, or None
    """
    options = getattr(getattr(quantization, "format", None), "options", None) or {}
    optional = options.get("optional")
    is_rotated = has_rotation(quantization) or bool(
        isinstance(optional, dict) and optional.get("quarot")
    )
    if method in READ_STATES and is_rotated:
        raise UnsupportedFeatureError(
            f"--speculative-config: method {method!r} is not supported in {RELEASE} for a model "
            "whose export has rotated its hidden states (quarot in its description), on which the"
            " head was not trained. Use 'mtp', 'ngram' or 'draft_model', or an export that is not"
            " rotated."
        )
