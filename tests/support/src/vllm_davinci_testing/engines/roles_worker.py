"""A worker that reports the side streams its layers have used."""

from vllm_davinci.core import components
from vllm_davinci.multistream import Role
from vllm_davinci.multistream.provider import StreamScheduler


class RolesWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def stream_roles(self) -> list[str]:
        """Returns the roles of all existing streams, which are created when first used."""
        scheduler = components.stream_scheduler()
        assert isinstance(scheduler, StreamScheduler)
        streams = scheduler._stream_pool()._streams
        return [role.value for role in Role if role in streams]
