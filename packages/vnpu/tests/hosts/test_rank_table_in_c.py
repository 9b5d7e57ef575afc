"""A C program makes a communicator from a rank table."""

import json
from pathlib import Path

from vllm_davinci_testing.processes.programs import output_of


def test_a_communicator_is_made_from_a_table_of_ranks(tmp_path: Path) -> None:
    device = {"device_id": "0", "device_ip": "192.168.1.8", "rank_id": "0"}
    server = {"server_id": "127.0.0.1", "device": [device]}
    table = tmp_path / "ranks.json"
    table.write_text(json.dumps({"version": "1.0", "server_list": [server], "status": "completed"}))
    lines = output_of(
        f"""
        import ctypes, torch, torch_npu
        torch.npu.set_device(0)
        hccl = ctypes.CDLL("libhccl.so")
        made, ranks = ctypes.c_void_p(), ctypes.c_uint32()
        table = {str(table).encode()!r}
        print(hccl.HcclCommInitClusterInfoConfig(table, 0, None, ctypes.byref(made)))
        print(hccl.HcclGetRankSize(made, ctypes.byref(ranks)), ranks.value)
        print(hccl.HcclCommInitClusterInfoConfig(b"/absent", 0, None, ctypes.byref(made)) != 0)
        """
    )
    assert lines == ["0", "0 1", "True"]
