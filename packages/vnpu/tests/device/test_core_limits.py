"""Limits of the cores that operators use, per process and device, and per stream.

Accepted values and precedence follow hicann/runtime (api_impl.cc).
"""

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of, run_to_exit

CHIP = VirtualDeviceConfig(soc="Ascend910B2")  # 24 cube and 48 vector cores


def test_a_streams_limit_goes_before_the_processes_and_that_before_the_chips() -> None:
    lines = output_of(
        """
        import torch, torch_npu
        torch.npu.set_device(0)
        side = torch.npu.Stream()
        def show():
            device, stream = torch.npu.get_device_limit(0), torch.npu.get_stream_limit(side)
            print(*device.values(), *stream.values())
        show()
        torch.npu.set_device_limit(0, 12, 20)
        show()
        torch.npu.set_stream_limit(side, vector_num=40)
        show()
        torch.npu.set_stream_limit(side, cube_num=24)
        show()
        torch.npu.reset_stream_limit(side)
        show()
        """,
        CHIP,
    )
    assert lines == [
        "24 48 24 48", "12 20 12 20", "12 20 12 40", "12 20 24 40", "12 20 12 20",
    ]  # fmt: skip


def test_a_thread_has_the_limit_of_the_stream_that_it_uses() -> None:
    lines = output_of(
        """
        import ctypes, threading, torch, torch_npu
        torch.npu.set_device(0)
        side, other = torch.npu.Stream(), torch.npu.Stream()
        torch.npu.set_stream_limit(side, 4, 8)
        acl = ctypes.CDLL("libascendcl.so")
        def cores():
            value = ctypes.c_uint32()
            assert acl.aclrtGetResInCurrentThread(1, ctypes.byref(value)) == 0
            return value.value
        def use(stream):
            assert acl.aclrtUseStreamResInCurrentThread(ctypes.c_void_p(stream.npu_stream)) == 0
        def unuse(stream):
            assert acl.aclrtUnuseStreamResInCurrentThread(ctypes.c_void_p(stream.npu_stream)) == 0
        print(cores())
        use(side)
        print(cores())
        def elsewhere():
            torch.npu.set_device(0)
            print(cores())
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        unuse(other)  # of another stream it means nothing
        print(cores())
        use(other)    # has no limit of its own
        print(cores())
        use(side)
        unuse(side)
        print(cores())
        """,
        CHIP,
    )
    assert lines == ["48", "8", "48", "8", "48", "48"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.npu.set_stream_limit(side, cube_num=25)", "25 cube cores: this chip has 24"),
        ("torch.npu.set_device_limit(0, vector_num=49)", "49 vector cores: this chip has 48"),
    ],
)
def test_more_cores_than_the_chip_has_are_refused(call: str, expected: str) -> None:
    done = run_to_exit(
        f"import torch, torch_npu\ntorch.npu.set_device(0)\nside = torch.npu.Stream()\n{call}", CHIP
    )
    assert done.status != 0
    assert expected in done.stderr
    assert "107000" in done.stderr


@pytest.mark.refused_calls
def test_without_a_core_nothing_can_be_tiled() -> None:
    done = run_to_exit(
        """
import torch, torch_npu
torch.npu.set_device(0)
x = torch.ones(8).npu()
side = torch.npu.Stream()
torch.npu.set_stream_limit(side, vector_num=0)
with torch.npu.stream(side):
    x + x
torch.npu.synchronize()
""",
        CHIP,
    )
    assert done.status != 0
    assert "no vector core is left to this thread's operators" in done.stderr
    assert "561002" in done.stderr
