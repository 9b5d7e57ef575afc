"""A thread's default device."""

from vllm_davinci_testing.processes.programs import output_of


def test_a_thread_without_a_device_uses_the_default_of_acl_inits_file():
    """torch_npu's file acl_default.json names device 0."""
    (line,) = output_of(
        """
        import torch, torch_npu
        print(torch.npu.get_device_properties(0).total_memory)
        """
    )
    assert line == str(64 << 30)
