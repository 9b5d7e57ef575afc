"""Compares a decode layer's collectives before and after a published change.

The change (vllm-project/vllm-ascend, pull request 1194, release 0.9.2rc1) concerns decodes from
graphs with experts on other ranks. The all-reduce after attention becomes a reduce-scatter. Each
rank sends its shard to the experts without slicing first. The all-gather moves from after the
experts, where it filled a list to concatenate, to before the next attention. Both versions have two
collectives per layer. Prints the modelled picoseconds saved per layer, by machine, as JSON:
`sharded_pair.py CHIP TOPOLOGY RANKS TOKENS`, under `vnpu run`.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch_npu

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu.timing import read_report, read_variants

HIDDEN_SIZE = 7168
LAYERS = 8
# Tasks between the ranks' collectives: about as many as in a layer of our engine.
ATTENTION, EXPERTS = 20, 6


class Layers:
    """Layers of `tokens` rows on `ranks` ranks: their collectives, and small tasks for all other
    work.
    """

    def __init__(self, ranks: int, tokens: int) -> None:
        def new(rows: int) -> torch.Tensor:
            return torch.empty(rows, HIDDEN_SIZE, dtype=torch.bfloat16, device="npu")

        self.own = tokens // ranks
        self.rows, self.gathered, self.parts = new(tokens), new(tokens), new(tokens)
        self.shard, self.sent, self.received = new(self.own), new(ranks), new(ranks)
        self.residual, self.residual_shard = new(tokens), new(self.own)
        self.weight = torch.empty(HIDDEN_SIZE, dtype=torch.bfloat16, device="npu")

    def before(self) -> None:
        torch_npu.npu_add_rms_norm(self.rows, self.residual, self.weight, 1e-6)
        self._tasks(ATTENTION)
        dist.all_reduce(self.rows)
        torch_npu.npu_add_rms_norm(self.rows, self.residual, self.weight, 1e-6)
        self.shard.copy_(self.rows[: self.own])
        self._exchange_with_experts()
        dist.all_gather_into_tensor(self.gathered, self.shard)
        self.parts.copy_(self.gathered)  # fills the list
        self.rows.copy_(self.parts)  # concatenates it

    def after(self) -> None:
        torch_npu.npu_add_rms_norm(self.shard, self.residual_shard, self.weight, 1e-6)
        dist.all_gather_into_tensor(self.rows, self.shard)
        self._tasks(ATTENTION)
        dist.reduce_scatter_tensor(self.shard, self.rows)
        torch_npu.npu_add_rms_norm(self.shard, self.residual_shard, self.weight, 1e-6)
        self._exchange_with_experts()

    def _exchange_with_experts(self) -> None:
        dist.all_to_all_single(self.received, self.sent)
        self._tasks(EXPERTS)
        dist.all_to_all_single(self.received, self.sent)

    def _tasks(self, count: int) -> None:
        for _ in range(count):
            torch.neg(self.shard, out=self.shard)


def times() -> dict[str, int]:
    torch.npu.synchronize()
    own = read_report().host_ps
    return {"": own, **{name: report.host_ps for name, report in read_variants().items()}}


def main(chip: str, topology: str, ranks: int, tokens: int) -> None:
    machine = VirtualDeviceConfig(
        devices=1, compute=False, chip=chip, topology=topology, phantom_ranks=True, variants=True
    )
    os.environ.update(machine.environment())  # read when the device is opened
    torch.npu.set_device(0)
    dist.init_process_group("hccl", rank=0, world_size=ranks, store=dist.HashStore())
    layers = Layers(ranks, tokens)
    dist.all_reduce(layers.rows)
    taken = []
    for layer in (layers.before, layers.after):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            for _ in range(LAYERS):
                layer()
        graph.replay()
        begin = times()
        graph.replay()
        end = times()
        taken.append({name: (end[name] - begin[name]) // LAYERS for name in end})
    before, after = taken
    print(json.dumps({name: before[name] - after[name] for name in before}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # the other ranks do not take part in ending the group
