"""All operators: definition, meta function, streams, and errors that name symbols."""

import inspect
import os
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_davinci import kernels, operators
from vllm_davinci.kernels._C import find_symbol, launches, operator_names
from vllm_davinci_testing.processes.programs import run_to_end


@pytest.mark.parametrize("name", [*operator_names(), *kernels.HOST_OPERATORS])
def test_each_operator_has_a_definition_with_its_arguments(name: str) -> None:
    schema = getattr(torch.ops.vllm_davinci, name).default._schema
    defined = inspect.signature(getattr(operators, name)).parameters
    assert [argument.name for argument in schema.arguments] == list(defined)


def test_an_operator_that_does_not_exist_is_refused_with_the_list() -> None:
    with pytest.raises(KeyError, match=r"no operator 'rms_nrom'.*rms_norm"):
        kernels.load("rms_nrom")


def test_stages_run_on_the_current_stream_in_order() -> None:
    side = torch.npu.Stream()
    x, weight = torch.ones(64, 256).npu(), torch.ones(256).npu()
    with torch.npu.stream(side):
        side.wait_stream(torch.npu.default_stream())
        for _ in range(20):
            x = torch.ops.vllm_davinci.rms_norm(x + 1, weight, 0.0)
        done = side.record_event()
    done.wait(torch.npu.current_stream())
    assert torch.equal(x.cpu(), torch.ones(64, 256))


def test_shapes_under_fake_tensors_equal_those_of_the_device() -> None:
    x, weight = torch.ones(3, 32).npu(), torch.ones(32).npu()
    expected = torch.ops.vllm_davinci.add_rms_norm_dynamic_quant(x, x, weight, 1e-6)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, x, weight)]
        found = torch.ops.vllm_davinci.add_rms_norm_dynamic_quant(*fake, 1e-6)
    for ours, real in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (real.shape, real.dtype, real.device)


QUEUED = """
import torch
import vllm_davinci.kernels
x, weight = torch.ones(4, 8).npu(), torch.ones(8).npu()
for _ in range(50):
    x = torch.ops.vllm_davinci.rms_norm(x * 2, weight, 0.0)
assert torch.equal(x.cpu(), torch.ones(4, 8))
q = torch.ones(4, 2, 128, dtype=torch.bfloat16).npu()
unmasked = (None, None, [4], [4], None, 1.0, 0, 2147483647, 2147483647, False)
for _ in range(100):
    torch.npu.empty_cache()
    for _ in range(30):
        x = torch.ops.vllm_davinci.rms_norm(x * 2, weight, 0.0)
    # Its workspace is larger than the one of launches that may be in the queue.
    torch.ops.vllm_davinci.prefill_attention(q, q, q, *unmasked)
assert torch.equal(x.cpu(), torch.ones(4, 8))
print("equal")
"""


@pytest.mark.parametrize("queue", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_stages_keep_their_place_in_torch_npus_queue(queue: str) -> None:
    """test_stages_run_on_the_current_stream_in_order runs without a queue."""
    done = run_to_end(
        [sys.executable, "-c", QUEUED], env={**os.environ, "TASK_QUEUE_ENABLE": queue}
    )
    assert done.stdout.endswith("equal\n"), done.stderr


def test_a_refusal_of_the_device_names_stage_operator_and_reason() -> None:
    x = torch.ones(2, 8, dtype=torch.int64).npu()
    with pytest.raises(
        RuntimeError, match=r"rms_norm: aclnnRmsNorm.*returned \d+: .*bfloat16; got Long"
    ):
        torch.ops.vllm_davinci.rms_norm(x, x[0], 1e-6)
        torch.npu.synchronize()


def test_a_function_that_cann_lacks_is_named_with_its_library() -> None:
    with pytest.raises(NotImplementedError, match=r"aclnnNoSuchThing is neither in .*libopapi\.so"):
        find_symbol("aclnnNoSuchThing")


def test_operators_whose_functions_cann_lacks_are_not_offered() -> None:
    assert kernels.supported_ops() == {
        *operator_names(),
        kernels.ATTENTION_GROUPS,
        *kernels.HOST_OPERATORS,
    }
    assert all(
        find_symbol(f"aclnn{launch}") for name in operator_names() for launch in launches(name)
    )
