"""A trainer's end of weight transfer, made as every engine of ours makes it."""

from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource

End = TypeVar("End")


def trainer_end(
    engine: type[End], init_info: Any, client: VLLMWeightSyncClient, source: WeightSource | None
) -> End:
    """The end of one rank, which has sent nothing yet.

    init_info: with `is_sender` and `buffer_bytes`
    Raises ValueError without a source.
    """
    if source is None:
        raise ValueError("A trainer sends what its WeightSource has: give `source`.")
    make: Any = engine
    made: End = make(
        client=client,
        source=source,
        is_sender=init_info.is_sender,
        packed_buffer_size_bytes=init_info.buffer_bytes,
    )
    return made
