"""Tests handles of events."""

from vllm_davinci_testing.processes.forked import output_of


def test_handles_of_destroyed_events_are_not_reused():
    """torch_npu removes an event from its list only after another thread has destroyed it."""
    (distinct,) = output_of(
        """
        import ctypes
        import torch
        torch.npu.set_device(0)
        acl = ctypes.CDLL("libascendcl.so")
        seen = set()
        for _ in range(200):
            event = ctypes.c_void_p()
            assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 1) == 0
            assert acl.aclrtDestroyEvent(event) == 0
            seen.add(event.value)
        print(len(seen))
        """
    )
    assert distinct == "200"
