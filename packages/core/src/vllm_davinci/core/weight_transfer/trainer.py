"""A trainer's end of weight transfer, made as every engine of ours makes it."""

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
    """The end of one rank, which has sent nothing yet.

    init_info: with `rank`, `is_sender` and `buffer_bytes`
    owner:     the trainer's rank that sends whole tensors, so that it has to own all of them
    Raises ValueError without a source, or for one that another rank has tensors of, and TypeError
    for one that gives no whole tensors.
    """
    if source is None:
        raise ValueError("A trainer sends what its WeightSource has: give `source`.")
    if not source.implements_iter_full():
        raise TypeError(f"{type(source).__name__} has no iter_full(): whole tensors are sent.")
    owned = set(source.owned_names(owner))
    if missing := [each.name for each in source.metadata if each.name not in owned]:
        raise ValueError(
            f"Rank {owner} of the trainer owns all but {len(missing)} tensors, among them "
            f"{missing[0]}, and it sends all of them: gather them in the source's iter_full()."
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
