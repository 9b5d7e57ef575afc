"""Collectives of unequal parts, within a server and between servers."""

import pytest

from vllm_davinci_testing.processes.forked import run_to_exit

# All ranks call HcclAllGatherV and HcclReduceScatterV with unequal parts; prints their statuses.
UNEQUAL_PARTS = """
import ctypes
from ctypes import byref, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

acl, hccl = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libhccl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
RANKS = {ranks}
acl.aclInit(None)
communicators = (c_void_p * RANKS)()
assert hccl.HcclCommInitAll(c_uint32(RANKS), (c_int32 * RANKS)(*range(RANKS)), communicators) == 0
counts = (c_uint64 * RANKS)(*range(1, RANKS + 1))
offsets = (c_uint64 * RANKS)(*(rank * (rank + 1) // 2 for rank in range(RANKS)))
found, streams = [], []
for rank in range(RANKS):
    acl.aclrtSetDevice(rank)
    stream, part, whole = c_void_p(), c_void_p(), c_void_p()
    acl.aclrtCreateStream(byref(stream))
    acl.aclrtMalloc(byref(part), c_size_t(512), 0)
    acl.aclrtMalloc(byref(whole), c_size_t(512), 0)
    comm, count = c_void_p(communicators[rank]), c_uint64(rank + 1)
    found.append(hccl.HcclAllGatherV(part, count, whole, counts, offsets, 4, comm, stream))
    said = acl.aclGetRecentErrMsg()
    found.append(hccl.HcclReduceScatterV(whole, counts, offsets, part, count, 4, 0, comm, stream))
    streams.append(stream)
for rank, stream in enumerate(streams):
    acl.aclrtSetDevice(rank)
    assert acl.aclrtSynchronizeStream(stream) == 0
print(set(found), said)
"""
SUCCESS, NOT_SUPPORT = 0, 5


@pytest.mark.parametrize(
    ("soc", "ranks", "server", "status"),
    [
        ("Ascend910_9391", 2, None, SUCCESS),
        ("Ascend910_9391", 2, 1, NOT_SUPPORT),
        ("reference:Ascend910_9391", 2, 1, SUCCESS),
        ("Ascend910B3", 2, 1, SUCCESS),
        ("Ascend910B3", 3, 2, NOT_SUPPORT),
    ],
)
def test_unequal_parts_go_between_servers_where_the_chip_has_it(soc, ranks, server, status):
    variables = {} if server is None else {"VNPU_SERVER_DEVICES": str(server)}
    done = run_to_exit(UNEQUAL_PARTS.replace("{ranks}", str(ranks)), VNPU_SOC=soc, **variables)
    assert done.status == 0, done.stderr
    assert done.stdout.startswith(f"{{{status}}}"), done.stdout
    if status == NOT_SUPPORT:
        told = "within one server only" if "910_93" in soc else "2, 1 ranks"
        assert told in done.stdout
