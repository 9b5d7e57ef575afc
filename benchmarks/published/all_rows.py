"""Time of a published revision's routed experts: all launches except the matrix products.

The revision (vllm-project/vllm-ascend at e9ada685ec, `fused_experts` with an expert map) copies a
    row for each token and chosen expert of all ranks, then quantizes, activates, weights, masks and
    sums all rows, although a rank's experts compute only 1 / ranks of them. Prints one layer's
    modelled picoseconds: `all_rows.py TOKENS`, under `vnpu run --no-compute --chip NAME`.
"""

import sys

import torch
import torch_npu

from published.deepseek_r1 import CONFIG
from vllm_davinci.vnpu.timing import read_report


def main(num_tokens: int) -> None:
    hidden_size, size = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    num_rows = num_tokens * CONFIG["num_experts_per_tok"]

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="npu")

    tokens, token_of_row = new(num_tokens, hidden_size), new(num_rows, dtype=torch.int64)
    gate_up, weights = new(num_rows, 2 * size), new(num_rows, 1)
    results, masked = new(num_rows, hidden_size), new(num_rows, 1, dtype=torch.bool)
    sums = new(num_tokens, hidden_size)
    torch.npu.synchronize()
    before = read_report()
    torch_npu.npu_dynamic_quant(tokens[token_of_row])
    torch_npu.npu_dynamic_quant(torch_npu.npu_swiglu(gate_up))
    results.mul_(weights).masked_fill_(masked, 0)
    sums.index_add_(0, token_of_row, results)
    torch.npu.synchronize()
    print((read_report() - before).compute_ps)


if __name__ == "__main__":
    main(int(sys.argv[1]))
