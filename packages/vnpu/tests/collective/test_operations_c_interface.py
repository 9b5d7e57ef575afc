"""Collectives through HCCL's C interface, on two devices of one process."""

from vllm_davinci_testing.processes.forked import output_of

# Functions that torch.distributed does not call, through the C interface, in one process.
C_INTERFACE = """
import ctypes, os
import torch, torch_npu  # initialise the runtime
import torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_int32, c_uint32, c_uint64, c_void_p

acl, hccl = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libhccl.so")
acl.aclGetRecentErrMsg.restype = c_char_p


def call(function, *arguments):
    status = function(*arguments)
    assert status == 0, (function.__name__, status, acl.aclGetRecentErrMsg())


devices = (c_int32 * 2)(0, 1)
communicators = (c_void_p * 2)()
call(hccl.HcclCommInitAll, c_uint32(2), devices, communicators)
comm = [c_void_p(c) for c in communicators]
streams, sends, receives = [], [], []
COUNT = 3  # float32 per rank
for device in range(2):
    call(acl.aclrtSetDevice, device)
    stream, send, receive = c_void_p(), c_void_p(), c_void_p()
    call(acl.aclrtCreateStream, byref(stream))
    for buffer, bytes_ in ((send, 2 * COUNT * 4), (receive, 2 * COUNT * 4)):
        call(acl.aclrtMalloc, byref(buffer), c_uint64(bytes_), 0)
    data = (ctypes.c_float * 6)(*[10.0 * device + i for i in range(6)])
    call(acl.aclrtMemcpy, send, c_uint64(24), data, c_uint64(24), 1)
    streams.append(stream), sends.append(send), receives.append(receive)

FLOAT32 = 4
for device in range(2):
    call(acl.aclrtSetDevice, device)
    call(hccl.HcclAlltoAll, sends[device], c_uint64(COUNT), FLOAT32, receives[device],
         c_uint64(COUNT), FLOAT32, comm[device], streams[device])
    call(hccl.HcclBarrier, comm[device], streams[device])


def results():
    values = []
    for device in range(2):
        call(acl.aclrtSetDevice, device)
        call(acl.aclrtSynchronizeStream, streams[device])
        out = (ctypes.c_float * 6)()
        call(acl.aclrtMemcpy, out, c_uint64(24), receives[device], c_uint64(24), 2)
        values.append(list(out))
    return values


assert results() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], results()
for device in range(2):
    call(acl.aclrtSetDevice, device)
    call(hccl.HcclScatter, sends[device], receives[device], c_uint64(COUNT), FLOAT32, c_uint32(1),
         comm[device], streams[device])
assert [r[:3] for r in results()] == [[10, 11, 12], [13, 14, 15]], results()

for device in range(2):
    size, name = c_uint32(9), ctypes.create_string_buffer(128)
    call(hccl.HcclGetRankSize, comm[device], byref(size))
    call(hccl.HcclGetCommName, comm[device], name)
    assert size.value == 2 and name.value
assert hccl.HcclAllReduce(sends[0], sends[0], c_uint64(1), 14, 0, comm[0], streams[0]) == 5
assert b"cannot reduce hifloat8" in acl.aclGetRecentErrMsg()
assert hccl.HcclAllReduce(sends[0], sends[0], c_uint64(200), FLOAT32, 0, comm[0], streams[0]) == 1
assert b"all_reduce (send buffer)" in acl.aclGetRecentErrMsg()
assert hccl.HcclSend(sends[0], c_uint64(1), FLOAT32, c_uint32(2), comm[0], streams[0]) == 1
assert b"names rank 2 in group" in acl.aclGetRecentErrMsg()
# Groups derived from one: of both ranks in the other order, twice with one id, and of one rank.
def derived(device, ids, rank, group):
    made = c_void_p()
    call(acl.aclrtSetDevice, device)  # per thread
    call(hccl.HcclCreateSubCommConfig, byref(comm[device]), c_uint32(len(ids)),
         (c_uint32 * len(ids))(*ids), c_uint64(group), c_uint32(rank), None, byref(made))
    return made


whole_name = name.value
for _ in range(2):
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda device: derived(device, [1, 0], 1 - device, 7), range(2)))
    for device in range(2):
        call(acl.aclrtSetDevice, device)
        call(hccl.HcclAllGather, sends[device], receives[device], c_uint64(COUNT), FLOAT32,
             parts[device], streams[device])
    assert results() == [[10, 11, 12, 0, 1, 2]] * 2, results()
    call(hccl.HcclGetCommName, parts[0], name)
    assert name.value == whole_name + b"_sub_7", name.value
    for part in parts:
        call(hccl.HcclCommDestroy, part)
alone = derived(1, [1], 0, 8)
call(hccl.HcclGetRankSize, alone, byref(size))
assert size.value == 1


def refusal(communicator, ids, rank):
    made = c_void_p()
    status = hccl.HcclCreateSubCommConfig(
        byref(communicator), c_uint32(len(ids)), (c_uint32 * len(ids))(*ids), c_uint64(9),
        c_uint32(rank), None, byref(made))
    return status, acl.aclGetRecentErrMsg()


none = c_void_p(1)
call(hccl.HcclCreateSubCommConfig, byref(comm[1]), c_uint32(0), None, c_uint64(0xFFFFFFFF),
     c_uint32(0), None, byref(none))
assert none.value is None
for ids, rank, why in (([0, 1], 0, b"own number"), ([1, 1], 0, b"twice"), ([1, 2], 0, b"twice")):
    status, message = refusal(comm[1], ids, rank)
    assert status == 1 and why in message, message
status, message = refusal(alone, [0], 0)
assert status == 5 and b"itself derived" in message, message
call(hccl.HcclCommDestroy, alone)

for device in range(2):
    call(hccl.HcclCommDestroy, comm[device])
assert hccl.HcclBarrier(comm[0], streams[0]) == 1
assert b"not a live communicator" in acl.aclGetRecentErrMsg()

# HCCL_ALGO, and hcclAlgo of a communicator, which has its form.
for text, status in (
    ("", 0), ("level0:NA;level1:NHR", 0), ("level0:fullmesh;level1:fullmesh", 0),
    ("allreduce=level0:NA;level1:ring/allgather=level0:NA;level1:H-D_R", 0),
    ("a" * 1599, 1), ("level0:ring", 1), ("level1:NHR;level1:ring", 1), ("level1:NHR;", 1),
    ("gather=level1:NHR", 1), ("level1:NHR/allreduce=level1:ring", 1),
):
    os.environ["HCCL_ALGO"] = text
    found = hccl.HcclCommInitAll(c_uint32(2), devices, communicators)
    assert found == status, (text, found)
    for communicator in communicators if found == 0 else ():
        call(hccl.HcclCommDestroy, c_void_p(communicator))
os.environ["HCCL_ALGO"] = ""
options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
options.hccl_config = {"hccl_algo": "fast"}
dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore(), pg_options=options)
try:
    dist.all_reduce(torch.ones(1).npu())
    raise AssertionError("an algorithm that is not there")
except RuntimeError as error:
    assert "hcclAlgo='fast' is not valid" in str(error), error
print("done")
"""


def test_the_c_interface_connects_two_devices_of_one_process() -> None:
    assert output_of(C_INTERFACE)[-1] == "done"
