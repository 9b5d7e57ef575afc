"""Element-wise functions of one tensor equal torch's on the CPU."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from hypothesis import given

from vllm_davinci_testing.operators.aclnn import call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors

# A kernel's vectorized and scalar paths differ in the last bit.
LAST_BIT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@given(x=tensors(FLOATS, special=True))
def test_npu_gelu_computes_the_form_asked_for(approximate: str, x: Pair) -> None:
    npu = torch_npu.npu_gelu(x.npu, approximate=approximate)
    compare(npu, F.gelu(x.cpu, approximate=approximate), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@given(x=tensors(FLOATS, special=True))
def test_gelu_is_the_tanh_form_without_compatible_implementations(x: Pair) -> None:
    npu = F.gelu(x.npu)
    compare(npu, F.gelu(x.cpu, approximate="tanh"), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@given(x=tensors(FLOATS, special=True))
def test_log_sigmoid_without_buffer_equals_torch(x: Pair) -> None:
    npu = x.npu.contiguous()
    out = torch.empty_like(npu)
    call("LogSigmoid", npu, out)
    compare(out, F.logsigmoid(x.cpu), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_sign_of_a_complex_number_is_its_direction(dtype: torch.dtype) -> None:
    x = torch.tensor([3 + 4j, 0, -2j, -5], dtype=dtype)
    compare(torch.sgn(x.npu()), torch.sgn(x), rtol=1e-6)
