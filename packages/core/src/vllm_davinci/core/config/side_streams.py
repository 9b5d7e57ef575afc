"""The scheduler of side streams inside layers, if an option requests them."""

from typing import TYPE_CHECKING

from vllm_davinci.core import components
from vllm_davinci.core.components.protocols import StreamScheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import ComponentError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ATTENTION = "torchair_graph_config.enable_multistream_mla"
EXPERTS = "torchair_graph_config.enable_multistream_moe"
PREFETCH = "weight_prefetch_config.enabled"


def side_stream(vllm_config: "VllmConfig", key: str) -> StreamScheduler | None:
    """The scheduler of an option's side stream; None if the option is off.

    key: ATTENTION (vector work of MLA), EXPERTS (shared experts) or PREFETCH (weights)
    Raises ComponentError without vllm-davinci-multistream.
    """
    section, name = key.split(".")
    if not getattr(getattr(get_config(vllm_config), section), name):
        return None
    scheduler = components.stream_scheduler()
    if scheduler is None:
        package = components.STREAMS.package
        raise ComponentError(
            f"{key} needs {package}, which is not installed. `pip install {package}` adds it."
        )
    return scheduler
