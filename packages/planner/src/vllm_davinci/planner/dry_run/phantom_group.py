"""Process groups in which all ranks but this one are phantoms that act like it.

Device tensors go to HCCL, whose collectives the virtual NPU models without waiting
(VNPU_PHANTOM_RANKS). Collectives of host tensors are answered here. torch calls `new_group` of the
default group if it has that method, so that no gloo group is created.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
import zmq
from torch._C._distributed_c10d import FakeWork, HashStore, PrefixStore

from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import place_group

BACKEND = "phantom"

# Placeholder that phantom ranks send instead of the name of a shared memory. vLLM collects these
# names to find the ranks of each node; with the placeholder each rank counts as a node of its own.
_FROM_A_PHANTOM = pickle.dumps("a phantom rank has no shared memory")

# Collectives of device tensors, by the names that torch.distributed calls.
_ON_DEVICE = (
    "all_gather_single",
    "all_to_all_single",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
)


def start(world_size: int) -> None:
    """Makes this process rank 0 of world_size. Call it before vLLM creates its groups."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "npu"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=world_size)


def _create(store: Any, rank: int, world_size: int, timeout: timedelta) -> PhantomGroup:
    return PhantomGroup(list(range(world_size)), "world")


class PhantomGroup(dist.ProcessGroup):
    """A process group of the ranks `ranks`, of which this process is the first."""

    def __init__(self, ranks: Sequence[int], name: str, hccl_options: Any = None) -> None:
        super().__init__(0, len(ranks))  # type: ignore[call-arg]  # stubs lack it
        self._ranks = list(ranks)
        self._name = name
        self._hccl_options = hccl_options
        self._device_group: dist.ProcessGroup | None = None
        self._subscribers: list[zmq.Socket[bytes]] = []
        self._waiting: dict[tuple[int, int], torch.Tensor] = {}  # rank, tag -> a tensor to receive

    # --- what torch asks of a group ------------------------------------------------------------

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> PhantomGroup | None:
        """Creates a group of these ranks; None if this process is not among them."""
        if 0 not in ranks:
            return None
        if ranks[0] != 0:
            raise DryRunError(f"rank 0 is not the first of the ranks {list(ranks)} of a group")
        return PhantomGroup(ranks, group_name, pg_options)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"PhantomGroup({self._name}, {len(self._ranks)} ranks)"

    def _get_backend(self, device: torch.device) -> Any:
        return self._on_device()._get_backend(device)

    # --- device tensors ------------------------------------------------------------------------

    def _on_device(self) -> dist.ProcessGroup:
        """HCCL's group of the same ranks, of which only this one exists; created at first use."""
        if self._device_group is None:
            hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
            options = self._hccl_options or hccl.Options()
            options.global_ranks_in_group = self._ranks
            options.group_id = self._name
            store = PrefixStore(f"{self._name}/", HashStore())
            backend = hccl(store, 0, len(self._ranks), options)
            backend._set_sequence_number_for_group()
            group = dist.ProcessGroup(store, 0, len(self._ranks))
            group._register_backend(
                torch.device("npu"), dist.ProcessGroup.BackendType.CUSTOM, backend
            )
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            self._device_group = group
            place_group(backend.get_hccl_comm_name(0), self._ranks)
        return self._device_group

    # --- both ----------------------------------------------------------------------------------

    def allreduce(  # type: ignore[override]  # one of torch's overloads
        self, tensors: Any, opts: Any = None
    ) -> Any:
        tensor = tensors[0]
        if tensor.device.type != "cpu":
            return self._on_device().allreduce(tensors, opts)
        # In a table with a column per rank, which each rank fills in, the phantoms' columns equal
        # this rank's. Any other tensor is a maximum or minimum, or says that every rank is its own
        # node: it stays unchanged.
        if tensor.dim() == 2 and tensor.shape[1] == len(self._ranks):
            tensor[:] = tensor[:, :1].clone()
        return FakeWork()

    def broadcast(  # type: ignore[override]  # one of torch's overloads
        self, tensors: Any, opts: Any
    ) -> Any:
        tensor = tensors[0]
        if tensor.device.type != "cpu":
            return self._on_device().broadcast(tensors, opts)
        if opts.rootRank == 0:
            if tensor.dtype == torch.uint8:
                self._subscribe(tensor)
        elif tensor.dtype == torch.int64 and tensor.numel() == 1:
            tensor.fill_(len(_FROM_A_PHANTOM))
        elif tensor.dtype == torch.uint8 and tensor.numel() == len(_FROM_A_PHANTOM):
            tensor.copy_(torch.frombuffer(bytearray(_FROM_A_PHANTOM), dtype=torch.uint8))
        else:
            raise DryRunError(
                f"rank {self._ranks[opts.rootRank]} of {self} is a phantom and has no value to "
                "broadcast. Leave out the option that needs it (pipeline parallelism, KV "
                "connectors, expert load balancing)."
            )
        return FakeWork()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if inputs[0].device.type != "cpu":
            return self._on_device().allgather(outputs, inputs, opts)
        for output in outputs[0]:
            output.copy_(inputs[0])
        return FakeWork()

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if tensors[0].device.type != "cpu":
            return self._on_device().send(tensors, dst, tag)
        if (waiting := self._waiting.pop((dst, tag), None)) is not None:
            self._exchange(tensors[0], waiting, dst)
        return FakeWork()

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        if tensors[0].device.type != "cpu":
            return self._on_device().recv(tensors, src, tag)
        self._waiting[src, tag] = tensors[0]
        return FakeWork()

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, rank: int) -> None:
        """Writes what a phantom sends at one stage of vLLM's sum over ranks (`cpu_all_reduce_`).

        The sum is over tables with a column per rank, each filled by its rank. At each stage a rank
        sends the columns that it has so far; a phantom sends the number that this rank has.
        """
        size = len(self._ranks)
        if sent.dim() != 2 or sent.shape[1] != size:
            raise DryRunError(f"rank {rank} of {self} is a phantom and has no value to send")
        received.zero_()
        received[:, rank : rank + min(rank, size & -size)] = sent[:, :1]

    def barrier(self, opts: Any = None) -> Any:
        return FakeWork()

    def _subscribe(self, sent: torch.Tensor) -> None:
        """Subscribes for the phantom readers if the broadcast tensor is a message queue's handle.

        They read nothing: messages to other nodes go through sockets, which drop what does not fit.
        """
        try:
            handle = pickle.loads(sent.numpy().tobytes())
        except Exception:  # not an object
            return
        address = getattr(handle, "remote_subscribe_addr", None)
        if address is None:
            return
        for _ in self._ranks[1:]:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
            socket.setsockopt_string(zmq.SUBSCRIBE, "")
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._subscribers.append(socket)


def _of_device(name: str) -> Any:
    def method(self: PhantomGroup, *arguments: Any, **options: Any) -> Any:
        return getattr(self._on_device(), name)(*arguments, **options)

    method.__name__ = name
    return method


for _name in _ON_DEVICE:
    setattr(PhantomGroup, _name, _of_device(_name))
