"""Where the ubatch that runs begins in its step."""

from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
)

_FIRST_TOKEN = "first_token_of_ubatch"


def first_token_of_ubatch() -> int | None:
    """Where the ubatch that runs begins in its step, in tokens; None in a step that is whole.

    For what keeps rows of the step's tokens beside the model's inputs. None outside of a forward.
    """
    if not is_forward_context_available():
        return None
    first: int | None = get_forward_context().additional_kwargs.get(_FIRST_TOKEN)
    return first


def set_first_token(context: ForwardContext, first: int) -> None:
    """Says in a ubatch's context where it begins."""
    context.additional_kwargs[_FIRST_TOKEN] = first
