"""Where the ubatch that runs begins in its step."""

from vllm.forward_context import ForwardContext, get_forward_context

_FIRST_TOKEN = "first_token_of_ubatch"


def first_token_of_ubatch() -> int | None:
    """Where the ubatch that runs begins in its step, in tokens; None in a step that is whole.

    For models that keep rows of the step's tokens beside their inputs. Call it in a forward.
    """
    first: int | None = get_forward_context().additional_kwargs.get(_FIRST_TOKEN)
    return first


def set_first_token(context: ForwardContext, first: int) -> None:
    """Says in a ubatch's context where it begins."""
    context.additional_kwargs[_FIRST_TOKEN] = first
