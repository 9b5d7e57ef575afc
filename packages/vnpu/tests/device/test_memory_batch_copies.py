"""Transfer engines copy many pieces in one call, and name devices by number."""

from vllm_davinci_testing.processes.forked import output_of

BATCH = """
import ctypes
import torch
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
HOST, DEVICE = (0, 0), (0, 1)

class Attribute(ctypes.Structure):
    _fields_ = [("to", ctypes.c_uint32 * 2), ("source", ctypes.c_uint32 * 2),
                ("reserved", ctypes.c_uint8 * 16)]

def attribute(to, source):
    return Attribute((ctypes.c_uint32 * 2)(*to), (ctypes.c_uint32 * 2)(*source))

def batch(to, sources, sizes, attributes, indexes, rooms=None):
    def pointers(tensors):
        return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    def numbers(values):
        return (ctypes.c_size_t * len(values))(*values)
    failed = ctypes.c_size_t()
    status = acl.aclrtMemcpyBatch(
        pointers(to), numbers(rooms or sizes), pointers(sources), numbers(sizes),
        ctypes.c_size_t(len(sizes)), (Attribute * len(attributes))(*attributes), numbers(indexes),
        ctypes.c_size_t(len(attributes)), ctypes.byref(failed))
    at = failed.value if failed.value != 2**64 - 1 else None
    print(at, acl.aclGetRecentErrMsg().decode() if status else "done")

host = [torch.arange(8, dtype=torch.uint8), torch.arange(8, 16, dtype=torch.uint8)]
device = [torch.zeros(8, dtype=torch.uint8, device="npu") for _ in host]
torch.npu.synchronize()
"""


def test_pieces_are_copied_in_one_direction_and_attributes_are_checked_against_addresses():
    lines = output_of(
        BATCH
        + """
batch(device, host, [8, 4], [attribute(DEVICE, HOST)], [0])
print([each.tolist() for each in device])
back = [torch.zeros(8, dtype=torch.uint8) for _ in host]
batch(back, device, [8, 8], [attribute(HOST, DEVICE)] * 2, [0, 1])
print([each.tolist() for each in back])
batch(device, host, [8, 8], [attribute(DEVICE, HOST), attribute(HOST, DEVICE)], [0, 1])
batch([device[0], back[0]], [host[0], device[1]], [8, 8],
      [attribute(DEVICE, HOST), attribute(HOST, DEVICE)], [0, 1])
batch(device, host, [8, 8], [attribute(DEVICE, HOST)] * 2, [0, 2])
batch(device, host, [8, 8], [attribute(DEVICE, HOST)] * 2, [0, 0])
batch(device, host, [8, 8], [attribute(DEVICE, HOST)], [0], rooms=[8, 4])
"""
    )
    assert lines[0] == "None done"
    assert lines[1] == "[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 0, 0, 0]]"
    assert lines[2:4] == ["None done", lines[1]]
    assert lines[4].startswith("1 ") and "do not fit the addresses" in lines[4]
    assert lines[5].startswith("1 ") and "only one of both" in lines[5]
    assert lines[6].startswith("None ") and "the first from 0 on" in lines[6]
    assert "in ascending order" in lines[7]
    assert "into room for 4" in lines[8]
