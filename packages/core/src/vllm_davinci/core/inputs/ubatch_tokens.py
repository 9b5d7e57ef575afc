"""Offset of the running ubatch in its step."""

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available

_FIRST_TOKEN = "first_token_of_ubatch"


def first_token_of_ubatch() -> int | None:
    """Offset of the running ubatch in its step, in tokens; None in a whole step.

    For callers that store data per token of the step outside the model's inputs. None outside a
    forward.
    """
    if not is_forward_context_available():
        return None
    first: int | None = get_forward_context().additional_kwargs.get(_FIRST_TOKEN)
    return first


def set_first_token(context: ForwardContext, first: int) -> None:
    """Stores a ubatch's offset in its context."""
    context.additional_kwargs[_FIRST_TOKEN] = first
