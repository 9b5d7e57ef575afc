"""Prints modelled times of a fixed sample of work, as JSON.

The sample has a call of each operator, and uses each mechanism of the timing model. Nothing is
computed, and the other ranks are phantoms. The machine is that of the recorded times, so that a
chip's figures do not change them; `--record` records the times on one of today's figures:

    vnpu run -- python -m vllm_davinci_testing.operators.modelled_calls --record

Recorded are "machine", the figures as VNPU_TIMING has them, and "times": name -> figure ->
picoseconds. Figures: "any" of the device, "host" of the host, and what the work occupies of each
resource alone.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu.operator_rows import declared
from vllm_davinci.vnpu.timing import pass_host_step, place_group, read_report, set_routed_share
from vllm_davinci.vnpu.timing.machine import MODELLED_CALLS
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.first_phase import argument_of
from vllm_davinci_testing.operators.illegal_calls import ALSO_LEGAL
from vllm_davinci_testing.operators.legal_calls import LEGAL, Operand

RANKS = 16
CONFIG = VirtualDeviceConfig(
    devices=1, compute=False, chip="ascend910b3", topology="nodes-of-8", phantom_ranks=True
)
_MIB = 1 << 20
# Larger than any chip's L2.
_FLUSHED_BYTES = 512 * _MIB
# For operators without a call in LEGAL: operands to try, in this order.
_DTYPES = ("float32", "float16", "int64", "bool")
_INTEGERS = ((0,), (1,), (1, 1), (64, 128), (2, 2, 2))

Work = Callable[[], object]


# Recorded with other arguments, before they had rules. Their names differ until all are recorded
# again, because step-time tables have to be made again with that.
RECORDED_OTHERWISE = frozenset(
    (
        "Baddbmm",
        "Ceil",
        "FlashAttentionScore",
        "LogicalNot",
        "MaxDim",
        "OneHot",
        "UpsampleBilinear2d",
    )
)


def calls(group: str) -> Iterator[tuple[str, list[Work]]]:
    """Yields each operator's name and calls; the first legal call is measured."""
    for name, arguments in (LEGAL | ALSO_LEGAL).items():
        named = {**arguments, "group": group} if "group" in arguments else arguments
        key = f"{name} legal" if name in RECORDED_OTHERWISE else name
        yield key, [partial(_launch, name.split()[0], list(named.values()))]
    for row in declared():
        name = row.operator.removeprefix("aclnn")
        if name not in LEGAL:
            parameters = row.arguments.strip("()").split(",")
            yield (
                name,
                [
                    partial(_launch, name, [_argument(each, dtype, ints) for each in parameters])
                    for dtype in _DTYPES
                    for ints in _INTEGERS
                ],
            )


def _argument(parameter: str, dtype: str, ints: tuple[int, ...]) -> Any:
    """Makes an argument for a parameter as spelled in the row: "const Tensor& self"."""
    [kind, *_] = parameter.replace("const ", "").replace("&", " ").split()
    match kind:
        case "Tensor" | "Out" | "InOut" | "LaidOut" | "LaidOutOut" | "DynamicOut":
            return Operand((64, 128), dtype)
        case "TensorList" | "OutList" | "InOutList" | "LaidOutList":
            return [Operand((64, 128), dtype)]
        case "Scalar" | "OptionalScalar":
            return aclnn.Number(1.0)
        case "IntArray":
            return ints
        case "int64_t" | "int32_t" | "uint64_t":
            return 1
        case "int8_t" | "bool" | "DType":
            return 0
        case "double":
            return 0.5
        case "float":
            return ctypes.c_float(0.5)
        case "Text":
            return "linear"
    return None  # an optional parameter


def _launch(name: str, arguments: list[Any]) -> None:
    aclnn.launch(name, *map(argument_of, arguments))


def _tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16, where: str = "npu") -> Any:
    return torch.empty(*sizes, dtype=dtype, device=where, pin_memory=where == "cpu")


@cache
def _side() -> Any:
    return torch.npu.Stream()


def _beside(one: Work, other: Work, *, by_turns: int = 1) -> None:
    """Runs `one` on the current stream, and `other` concurrently on the side stream."""
    side, main = _side(), torch.npu.current_stream()
    side.wait_stream(main)
    for _ in range(by_turns):
        one()
    with torch.npu.stream(side):
        for _ in range(by_turns):
            other()
    main.wait_stream(side)


def _negate(of: Any) -> Any:
    return torch.neg(of, out=of)


def mechanisms(group: dist.ProcessGroup) -> Iterator[tuple[str, Work]]:
    """Yields work that uses each mechanism of the timing model."""
    x, weight, rows = _tensor(4096, 4096), _tensor(4096, 4096), _tensor(16384, 4096)

    def product(of: Any = x) -> Any:
        return of @ weight

    def prefetched() -> None:
        with torch.npu.stream(_side()):
            torch_npu.npu_prefetch(weight, None, weight.nbytes)
        _negate(x)
        product(x[:16])

    negate = partial(_negate, rows)
    yield "product", product
    yield "product of few rows", partial(product, x[:16])
    yield "product, its operands in L2", lambda: (product(), product())
    yield "product after a prefetch", prefetched
    yield "product beside element-wise work", partial(_beside, product, negate, by_turns=3)
    yield "product beside a product", partial(_beside, product, product)
    yield from _streams(product, negate, x)
    yield "more launches than a queue holds", lambda: [negate() for _ in range(3000)]
    yield "step of the host", partial(pass_host_step, 8, False)
    yield "step of the host beside the device", lambda: (negate(), pass_host_step(8, True))
    for name, work in _collectives(group).items():
        yield name, work
        yield f"{name} beside a product", partial(_beside, product, work)
    # Every fourth rank.
    place_group(_name_of(group), list(range(0, 4 * RANKS, 4)))
    for name, work in _collectives(group).items():
        yield f"{name} of distant ranks", work


def _streams(product: Work, negate: Work, x: torch.Tensor) -> Iterator[tuple[str, Work]]:
    """Yields work on limited cores, many streams, graphs, and copies."""
    streams = [torch.npu.Stream() for _ in range(32)]
    on_host, there = _tensor(8 * _MIB, where="cpu"), _tensor(8 * _MIB)

    def limited() -> None:
        torch.npu.set_stream_limit(_side(), vector_num=8)
        _beside(product, negate)
        torch.npu.reset_stream_limit(_side())

    def queues() -> None:
        for stream in streams:
            stream.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(stream):
                _negate(x)

    def routed() -> None:
        set_routed_share(1, 4)
        _launch("GroupedMatmulV5", list(LEGAL["GroupedMatmulV5"].values()))
        set_routed_share(1, 1)

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        _beside(product, negate, by_turns=3)
    yield "element-wise work on some cores", limited
    yield "streams beyond the hardware queues", queues
    yield "graph", graph.replay
    yield "routed rows", routed
    yield "copy to the device", partial(there.copy_, on_host, non_blocking=True)
    yield "copy to the host", partial(on_host.copy_, there, non_blocking=True)
    yield "copies beside work", partial(_beside, product, partial(there.copy_, on_host, True))
    yield "launches", lambda: [_negate(x[:1]) for _ in range(64)]


def _collectives(group: dist.ProcessGroup) -> dict[str, Work]:
    parts, part = _tensor(group.size() * 64, 4096), _tensor(64, 4096)
    return {
        "all_reduce": partial(dist.all_reduce, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, parts, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, parts, part, group=group),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(parts), parts, group=group),
        "broadcast": partial(dist.broadcast, part, 0, group=group),
        "barrier": partial(dist.barrier, group=group),
    }


def _name_of(group: dist.ProcessGroup) -> str:
    name: str = group._get_backend(torch.device("npu")).get_hccl_comm_name(0)
    return name


def times() -> dict[str, int]:
    report = read_report()
    figures = {"any": report.any_ps, "host": report.host_ps, **report.busy_ps}
    return figures


def measured(work: Work, flushed: torch.Tensor) -> dict[str, int]:
    """Returns the work's figures, with its operands not in L2, right after the ranks met."""
    dist.all_reduce(flushed[:1])
    torch.neg(flushed, out=flushed)
    torch.npu.synchronize()
    before = times()
    work()
    after = times()
    return {name: ps - before[name] for name, ps in after.items() if ps != before[name]}


def sample(machine: str) -> dict[str, Any]:
    """Returns the figures by name; None for an operator without a legal call."""
    os.environ.update(CONFIG.environment(), VNPU_TIMING=machine)  # read when the device is opened
    torch.npu.set_device(0)
    dist.init_process_group("hccl", rank=0, world_size=RANKS, store=dist.HashStore())
    group = dist.group.WORLD
    assert group is not None
    flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.float32, device="npu")
    found: dict[str, Any] = {}
    for operator, ways in calls(_name_of(group)):
        for work in ways:
            try:
                found[f"aclnn{operator}"] = measured(work, flushed)
                break
            except RuntimeError:  # not a legal call
                found[f"aclnn{operator}"] = None
    return found | {name: measured(work, flushed) for name, work in mechanisms(group)}


def main(*, records: bool) -> None:
    if records:
        machine = CONFIG.environment()["VNPU_TIMING"]
    else:
        machine = json.loads(MODELLED_CALLS.read_text(encoding="utf-8"))["machine"]
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in sample(machine).items()
    )
    text = f'{{"machine": {json.dumps(machine)},\n"times": {{\n{lines}\n}}}}\n'
    if records:
        MODELLED_CALLS.write_text(text, encoding="utf-8")
    else:
        print(text, end="", flush=True)


if __name__ == "__main__":
    main(records="--record" in sys.argv)
    os._exit(0)  # the phantoms do not take part in ending the group
