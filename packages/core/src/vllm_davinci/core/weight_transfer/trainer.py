"""Creates the trainer's end of a weight transfer, for all engines alike."""

from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource

End = TypeVar("End")


def trainer_end(
    engine: type[End],
    init_info: Any,
    client: VLLMWeightSyncClient,
    source: WeightSource | None,
    owner: int,
) -> End:
    """Creates the end of one rank.

    init_info: has `rank`, `is_sender` and `buffer_bytes`
    owner:     the trainer's rank that sends; it must own all whole tensors
    Raises ValueError without a source, or if another rank owns some of its tensors, and TypeError
    for a source without whole tensors.
    """
    if source is None:
        raise ValueError("A trainer sends the tensors of a WeightSource: pass `source`.")
    if not source.implements_iter_full():
        raise TypeError(f"{type(source).__name__} has no iter_full(), and whole tensors are sent.")
    owned = set(source.owned_names(owner))
    if missing := [each.name for each in source.metadata if each.name not in owned]:
        raise ValueError(
            f"Rank {owner} of the trainer sends all tensors and does not own {len(missing)} of "
            f"them, among them {missing[0]}: gather them in the source's iter_full()."
        )
    make: Any = engine
    made: End = make(
        client=client,
        source=source,
        is_sender=init_info.is_sender,
        rank=init_info.rank,
        packed_buffer_size_bytes=init_info.buffer_bytes,
    )
    return made
