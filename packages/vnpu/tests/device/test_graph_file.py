"""Graphs written as files."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import output_of

pytestmark = pytest.mark.nightly("operators")

INVALID = "107000"


def test_a_graph_is_written_as_a_file_of_its_tasks(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    lines = output_of(
        f"""
        import ctypes, torch, torch_npu
        torch.npu.set_device(0)
        acl, graph, stream = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), ctypes.c_void_p()
        source, target = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
        torch.npu.synchronize()
        assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
        assert acl.aclmdlRICaptureBegin(stream, 2) == 0
        size = ctypes.c_size_t(target.nbytes)
        assert acl.aclrtMemcpyAsync(
            ctypes.c_void_p(target.data_ptr()), size, ctypes.c_void_p(source.data_ptr()), size, 3,
            stream) == 0
        assert acl.aclmdlRICaptureEnd(stream, ctypes.byref(graph)) == 0
        for place in ({str(path).encode()!r}, b"/absent/graph.json", None):
            print(acl.aclmdlRIDebugJsonPrint(graph, place, 0))
        """
    )
    assert lines == ["0", INVALID, INVALID]
    (task,) = json.loads(path.read_text())
    assert (task["name"], task["ph"], task["args"]["Task ID"]) == ("memory copy", "X", 0)
    assert set(task["args"]) == {"Model ID", "Stream ID", "Task ID", "Task Type"}
