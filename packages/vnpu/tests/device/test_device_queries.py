"""Queries of C programs to the runtime: versions, features, streams."""

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of

PREAMBLE = """
import ctypes, torch, torch_npu
torch.npu.set_device(0)
acl, number = ctypes.CDLL("libascendcl.so"), ctypes.c_int32(-1)
"""


def output_of_calls(code: str) -> list[str]:
    return output_of(PREAMBLE + code)


@pytest.mark.parametrize(("cann", "expected"), [("8.5", "80500000"), ("9.0", "90000000")])
def test_versions_are_numbers_that_grow_with_releases(cann: str, expected: str) -> None:
    lines = output_of(
        PREAMBLE + 'acl.aclsysGetVersionNum(b"runtime", ctypes.byref(number)); print(number.value)',
        VirtualDeviceConfig(cann=cann),
    )
    assert lines == [expected]


def test_chips_are_compatible_where_their_cores_are() -> None:
    lines = output_of_calls(
        """
for soc in (b"Ascend910B1", b"Ascend910_9391", b"Ascend310P3", b"none"):
    status = acl.aclrtCheckArchCompatibility(soc, ctypes.byref(number))
    print(status, number.value)
"""
    )
    assert lines[:3] == ["0 1", "0 1", "0 0"]
    assert not lines[3].startswith("0 ")


def test_features_are_there_or_not_and_others_are_unknown() -> None:
    lines = output_of_calls(
        """
for feature in (1, 21, 99):
    status = acl.aclrtGetDeviceCapability(0, feature, ctypes.byref(number))
    print(status == 0, number.value)
"""
    )
    assert lines == ["True 1", "True 0", "False 0"]


def test_results_that_overflow_are_infinities_and_no_other_mode_is_taken() -> None:
    saturation, infinities = 0, 1
    lines = output_of_calls(
        f"""
for mode in ({saturation}, {infinities}):
    print(acl.aclrtSetDeviceSatMode(mode))
acl.aclrtGetDeviceSatMode(ctypes.byref(number))
print(number.value)
"""
    )
    assert lines == ["207000", "0", str(infinities)]


def test_a_missing_output_pointer_is_an_error() -> None:
    """One of CANN's examples calls it."""
    assert output_of_calls("print(acl.aclrtGetRunMode(None))") == ["107000"]


def test_the_default_stream_has_a_handle_which_stays() -> None:
    lines = output_of_calls(
        """
handles = [ctypes.c_void_p(), ctypes.c_void_p()]
for handle in handles:
    assert acl.aclrtCtxGetCurrentDefaultStream(ctypes.byref(handle)) == 0
print(handles[0].value == handles[1].value != 0, acl.aclrtSynchronizeStream(handles[0]))
"""
    )
    assert lines == ["True 0"]
