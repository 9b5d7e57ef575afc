"""Collectives on HCCL through torch.distributed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vllm_davinci.core.distributed.ubatch_communicator import UbatchCommunicator


class NPUCommunicator(UbatchCommunicator):
    """Collectives of one group of NPUs; they preserve their inputs unless documented otherwise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp, self._sum.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), True

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sums over the group. Returns a new tensor; input_ is preserved."""
        return self.all_reduce_in_place(input_.clone(memory_format=torch.contiguous_format))

    def all_reduce_in_place(self, input_: torch.Tensor) -> torch.Tensor:
        """Sums over the group, in place."""
        self._collective("all_reduce", lambda: self._begin_sum(input_))
        return input_

    def _begin_sum(self, values: torch.Tensor) -> Any:
        # dist.all_reduce without its wrappers, because each layer has two all-reduces.
        return self.device_group.allreduce([values], self._sum)

    def begin_all_reduce(self, input_: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sums over the group, in place; the sum is valid once the returned function has been
        called.

        In a ubatch this starts no other ubatch's turn, and the current stream continues: call the
        function after this ubatch's next collective.
        """
        handles: list[Any] = []

        def begin() -> Any:
            handles.append(self._begin_sum(input_))
            return handles[0]

        def result() -> torch.Tensor:
            handles[0].wait()
            return input_

        self._collective("all_reduce", begin, waits=False)
        return result

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates every rank's input_ along `dim`; all have the same shape."""
        dim = dim % input_.dim()
        contiguous = input_.contiguous()
        shape = contiguous.shape
        gathered = contiguous.new_empty((self.world_size * shape[0], *shape[1:]))
        self._collective(
            "all_gather",
            lambda: dist.all_gather_single(
                gathered, contiguous, group=self.device_group, async_op=True
            ),
        )
        if dim == 0:
            return gathered
        by_rank = gathered.view(self.world_size, *shape).movedim(0, dim)
        return by_rank.reshape(*shape[:dim], self.world_size * shape[dim], *shape[dim + 1 :])

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Like all_gather along dimension 0, with sizes[rank] rows from each rank."""
        if dim != 0:
            raise NotImplementedError(f"all_gatherv along dimension {dim}: only 0 is supported.")
        if isinstance(input_, list):
            return [self._all_gatherv(tensor, sizes) for tensor in input_]
        return self._all_gatherv(input_, sizes)

    def _all_gatherv(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return self.all_gather(input_, 0)
        _check_sizes(sizes, self.world_size, input_.shape[0], sizes[self.rank_in_group])
        contiguous = input_.contiguous()
        if self.pads_unequal_parts:
            gathered = self.all_gather(_padded(contiguous, max(sizes)), 0)
            by_rank = gathered.view(self.world_size, max(sizes), *input_.shape[1:])
            return torch.cat([rows[:size] for rows, size in zip(by_rank, sizes, strict=True)])
        gathered = contiguous.new_empty((sum(sizes), *input_.shape[1:]))
        parts = list(gathered.split(sizes))
        self._collective(
            "all_gatherv",
            lambda: dist.all_gather(parts, contiguous, group=self.device_group, async_op=True),
        )
        return gathered

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Sums over the group; each rank gets its equal part along `dim`."""
        dim = dim % input_.dim()
        if input_.shape[dim] % self.world_size:
            raise ValueError(
                f"reduce_scatter of {tuple(input_.shape)} along dimension {dim}: "
                f"{input_.shape[dim]} rows do not divide into {self.world_size} ranks. Pad them, "
                "or call reduce_scatterv."
            )
        by_rows = input_.movedim(dim, 0).contiguous()
        part = by_rows.new_empty((by_rows.shape[0] // self.world_size, *by_rows.shape[1:]))
        self._collective(
            "reduce_scatter",
            lambda: dist.reduce_scatter_single(
                part, by_rows, group=self.device_group, async_op=True
            ),
        )
        return part.movedim(0, dim).contiguous()

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Like reduce_scatter; rank r gets sizes[r] rows."""
        if sizes is None or len(set(sizes)) == 1:
            return self.reduce_scatter(input_, dim)
        dim = dim % input_.dim()
        by_rows = input_.movedim(dim, 0).contiguous()
        _check_sizes(sizes, self.world_size, by_rows.shape[0], sum(sizes))
        if self.pads_unequal_parts:
            padded = torch.cat([_padded(rows, max(sizes)) for rows in by_rows.split(sizes)])
            own = self.reduce_scatter(padded, 0)[: sizes[self.rank_in_group]]
            return own.movedim(0, dim).contiguous()
        part = by_rows.new_empty((sizes[self.rank_in_group], *by_rows.shape[1:]))
        parts = list(by_rows.split(sizes))
        self._collective(
            "reduce_scatterv",
            lambda: dist.reduce_scatter(part, parts, group=self.device_group, async_op=True),
        )
        return part.movedim(0, dim).contiguous()

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """All-gathers, and returns the result on rank `dst` only: HCCL has no gather."""
        gathered = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with rank `src`'s, and returns it."""
        self._collective(
            "broadcast",
            lambda: dist.broadcast(tensor, self.ranks[src], group=self.device_group, async_op=True),
        )
        return tensor

    def all_to_all(
        self,
        input_: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """Sends each rank its rows of input_; returns the rows that all ranks sent here.

        input_:       [rows, ...], in the order of the destination ranks
        input_sizes:  rows for each rank; None: equal parts
        output_sizes: rows from each rank, equal to its input_sizes entry for this rank; None: equal
                      parts
        Returns [sum(output_sizes), ...] in the order of the source ranks.
        """
        rows = input_.contiguous()
        if output_sizes is None or input_sizes is None:
            if rows.shape[0] % self.world_size:
                raise ValueError(
                    f"all_to_all of {tuple(rows.shape)} in equal parts: {rows.shape[0]} rows do "
                    f"not divide into {self.world_size} ranks. Pass input_sizes and output_sizes."
                )
            received = torch.empty_like(rows)
        else:
            _check_sizes(input_sizes, self.world_size, rows.shape[0], sum(input_sizes))
            received = rows.new_empty((sum(output_sizes), *rows.shape[1:]))
        self._collective(
            "all_to_all",
            lambda: dist.all_to_all_single(
                received, rows, output_sizes, input_sizes, group=self.device_group, async_op=True
            ),
        )
        return received

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        assert self.all2all_manager is not None
        return self.all2all_manager.dispatch(*args, **kwargs)

    def combine(
        self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        assert self.all2all_manager is not None
        return self.all2all_manager.combine(hidden_states, is_sequence_parallel)

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> None:
        """Starts all sends and receives together and waits for them."""
        for work in dist.batch_isend_irecv(p2p_ops):
            work.wait()


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[count, ...]: the rows, then zeros."""
    missing = count - rows.shape[0]
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _check_sizes(sizes: list[int], world_size: int, rows: int, expected_rows: int) -> None:
    if len(sizes) != world_size or rows != expected_rows:
        raise ValueError(
            f"Sizes {sizes} for {world_size} ranks, and this rank holds {rows} rows where "
            f"{expected_rows} were announced. Every rank must pass the same sizes."
        )
