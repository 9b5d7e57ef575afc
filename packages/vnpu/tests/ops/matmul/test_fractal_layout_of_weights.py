"""Products with weights in FRACTAL_NZ equal those with dense weights.

torch_npu converts weights through aclnn only for some chips, so these tests run in a process with
one of them.
"""

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import output_of

PROGRAM = """
import torch, torch_npu
torch.npu.config.allow_internal_format = True
g = torch.Generator().manual_seed(0)
ints = lambda *s: torch.randint(-128, 128, s, generator=g).to(torch.int8).npu()
floats = lambda *s: torch.rand(s, generator=g).npu()
tiles = lambda t: torch_npu.npu_format_cast(t, 29)
dense = lambda t: t

def run(weight_form):
    g.manual_seed(0)
    x, w, experts = ints(8, 32), ints(32, 64), ints(3, 32, 64)
    scale, rows = floats(64) * 1e-3, floats(8)
    counts = torch.tensor([3, 0, 4]).npu()
    yield torch_npu.npu_quant_matmul(
        x, weight_form(w), scale, pertoken_scale=rows, output_dtype=torch.bfloat16)
    yield torch_npu.npu_grouped_matmul(
        [x], [weight_form(experts)], scale=[floats(3, 64).bfloat16()], per_token_scale=[rows],
        group_list=counts, split_item=3, group_type=0, group_list_type=1,
        output_dtype=torch.bfloat16)[0]
    yield torch_npu.npu_weight_quant_batchmatmul(
        floats(4, 32).half(), weight_form(w), scale.half())

names = ("quant", "grouped", "weight")
for name, a, b in zip(names, list(run(dense)), list(run(tiles))):
    print(name, torch.equal(a.cpu(), b.cpu()), a.float().abs().sum().item() > 0)
w = tiles(ints(32, 64))
print("format", torch_npu.get_npu_format(w))
"""


def test_products_do_not_depend_on_the_layout_of_the_weight() -> None:
    lines = output_of(PROGRAM, VirtualDeviceConfig(soc="Ascend950PR_9599"))
    assert lines == [
        "quant True True",
        "grouped True True",
        "weight True True",
        "format FRACTAL_NZ",
    ]
