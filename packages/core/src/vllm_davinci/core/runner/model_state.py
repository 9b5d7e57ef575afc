"""A step's view of its model: attention metadata, states, embeddings."""

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_davinci.core.runner.prompt_embeds import NPUPromptEmbeds


class NPUModelState(ModelState):
    """vLLM's state of a model, which keeps the metadata of the newest step for a graph's replay.

    is_plain: whether the model has nothing that follows its requests on the device
    """

    newest_metadata: dict[str, Any] | None = None
    is_plain: bool

    @staticmethod
    def taking_over(state: ModelState) -> "NPUModelState":
        """The same object, of a class that has vLLM's own for this model behind ours."""
        plain = type(state) is DefaultModelState
        state.__class__ = _behind_ours(type(state))
        assert isinstance(state, NPUModelState)
        state.is_plain = plain
        if getattr(state, "prompt_embeds_state", None) is not None:
            NPUPromptEmbeds.taking_over(state.prompt_embeds_state)
        return state

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = super().prepare_attn(*args, **kwargs)
        self.newest_metadata = metadata
        return metadata


def _behind_ours(cls: type[Any]) -> type[Any]:
    return type(f"NPU{cls.__name__}", (NPUModelState, cls), {})
