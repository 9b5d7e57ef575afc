"""C programs query the runtime."""

from vllm_davinci_testing.processes.forked import output_of

PREAMBLE = """
import ctypes, torch, torch_npu
torch.npu.set_device(0)
acl, number = ctypes.CDLL("libascendcl.so"), ctypes.c_int32(-1)
"""


def output_of_calls(code: str) -> list[str]:
    return output_of(PREAMBLE + code)


def test_results_that_overflow_are_infinities_and_no_other_mode_is_taken() -> None:
    saturation, infinities = 0, 1
    lines = output_of_calls(
        f"""
for mode in ({saturation}, {infinities}):
    print(acl.aclrtSetDeviceSatMode(mode))
"""
    )
    assert lines == ["207000", "0"]


def test_a_missing_output_pointer_is_an_error() -> None:
    """One of CANN's examples calls this function."""
    assert output_of_calls("print(acl.aclrtGetRunMode(None))") == ["107000"]
