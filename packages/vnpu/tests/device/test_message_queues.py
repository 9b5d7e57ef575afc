"""Queues and channels of tensors: what threads of a process exchange, refusals, routes."""

from __future__ import annotations

from vllm_davinci_testing.processes.programs import output_of

INVALID, EMPTY, FULL, FAILED = "100000", "207013", "207014", "500001"

PREAMBLE = """
import ctypes, threading, time, torch, torch_npu
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_void_p, sizeof
torch.npu.set_device(0)
"""
CHANNELS = (
    PREAMBLE
    + """
tdt = ctypes.CDLL("libacl_tdt_channel.so")
for name in ("CreateChannelWithCapacity", "CreateDataItem", "CreateDataset", "GetDataItem",
             "GetDataAddrFromItem"):
    getattr(tdt, "acltdt" + name).restype = c_void_p
tdt.acltdtGetDatasetSize.restype = tdt.acltdtGetDataSizeFromItem.restype = c_size_t
tdt.acltdtGetDimNumFromItem.restype = c_size_t

def channel(name, capacity, device=0):
    made = tdt.acltdtCreateChannelWithCapacity(device, name, c_size_t(capacity))
    return made and c_void_p(made)

kept = []

def dataset(*tensors):
    kept.extend(tensors)
    made = c_void_p(tdt.acltdtCreateDataset())
    for tensor in tensors:
        dims = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        item = c_void_p(tdt.acltdtCreateDataItem(
            0, dims, c_size_t(tensor.dim()), 0, c_void_p(tensor.data_ptr()),
            c_size_t(tensor.nbytes)))
        assert tdt.acltdtAddDataItem(made, item) == 0
    return made

def contents(made):
    found = []
    for index in range(tdt.acltdtGetDatasetSize(made)):
        item = c_void_p(tdt.acltdtGetDataItem(made, c_size_t(index)))
        dims = (ctypes.c_int64 * tdt.acltdtGetDimNumFromItem(item))()
        assert tdt.acltdtGetDimsFromItem(item, dims, c_size_t(len(dims))) == 0
        size = tdt.acltdtGetDataSizeFromItem(item)
        address = tdt.acltdtGetDataAddrFromItem(item)
        floats = (ctypes.c_float * (size // 4)).from_address(address)
        found.append((list(dims), list(floats)))
    return found

def size(made):
    number = c_size_t()
    assert tdt.acltdtQueryChannelSize(made, byref(number)) == 0
    return number.value
"""
)
QUEUES = (
    PREAMBLE
    + """
tdt = ctypes.CDLL("libacl_tdt_queue.so")
for name in ("Attr", "Route", "RouteList", "RouteQueryInfo"):
    getattr(tdt, "acltdtCreateQueue" + name).restype = c_void_p
tdt.acltdtGetQueueRouteNum.restype = c_size_t

def queue(name, depth):
    attributes, number = c_void_p(tdt.acltdtCreateQueueAttr()), c_uint32()
    pointer = c_char_p(name)
    assert tdt.acltdtSetQueueAttr(attributes, 0, c_size_t(8), byref(pointer)) == 0
    assert tdt.acltdtSetQueueAttr(attributes, 1, c_size_t(4), byref(c_uint32(depth))) == 0
    status = tdt.acltdtCreateQueue(attributes, byref(number))
    assert tdt.acltdtDestroyQueueAttr(attributes) == 0
    return number.value if status == 0 else -status

def put(number, text, user=b"", timeout=0):
    return tdt.acltdtEnqueueData(c_uint32(number), text, c_size_t(len(text)), user or None,
                                 c_size_t(len(user)), timeout, 0)

def get(number, room=64, timeout=0):
    text, user, size = ctypes.create_string_buffer(room), ctypes.create_string_buffer(8), c_size_t()
    status = tdt.acltdtDequeueData(c_uint32(number), text, c_size_t(room), byref(size), user,
                                   c_size_t(8), timeout)
    return (text.raw[: size.value].decode(), user.value.decode()) if status == 0 else status

def routes(*pairs):
    made = c_void_p(tdt.acltdtCreateQueueRouteList())
    for source, target in pairs:
        route = c_void_p(tdt.acltdtCreateQueueRoute(c_uint32(source), c_uint32(target)))
        assert tdt.acltdtAddQueueRoute(made, route) == 0
    return made
"""
)


def test_a_channel_hands_tensors_of_host_and_device_on_as_they_were_when_sent() -> None:
    lines = output_of(
        CHANNELS
        + """
made = channel(b"tensors", 2)
host = torch.arange(6.0).reshape(2, 3)
device = torch.tensor([7.0, 8.0], device="npu")
torch.npu.synchronize()
print(tdt.acltdtSendTensor(made, dataset(host, torch.ones(1)), 0), size(made))
print(tdt.acltdtSendTensor(made, dataset(device), 0), size(made))
host.zero_()
print(tdt.acltdtSendTensor(made, dataset(host), 0), size(made))
taken = c_void_p(tdt.acltdtCreateDataset())
for _ in range(2):
    print(tdt.acltdtReceiveTensor(made, taken, 0), contents(taken))
print(tdt.acltdtReceiveTensor(made, taken, 0), size(made))
"""
    )
    assert lines == [
        "0 1",
        "0 2",
        f"{FULL} 2",
        "0 [([2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), ([1], [1.0])]",
        "0 [([2], [7.0, 8.0])]",
        f"{EMPTY} 0",
    ]


def test_channels_refuse_what_their_pages_exclude() -> None:
    lines = output_of(
        CHANNELS
        + """
print(channel(b"few", 1), channel(b"many", 8193), channel(b"x" * 128, 2), channel(b"far", 2, 99))
made = channel(b"one", 2)
print(channel(b"one", 2), channel(None, 2))
print(tdt.acltdtSendTensor(made, None, 0), tdt.acltdtSendTensor(None, dataset(), 0))
print(tdt.acltdtReceiveTensor(made, dataset(torch.ones(1)), 0), "sent" , size(made))
full = dataset(torch.ones(1))
elsewhere = torch.ones(1, device="npu")
item = c_void_p(tdt.acltdtCreateDataItem(0, None, c_size_t(0), 0,
                                         c_void_p(elsewhere.data_ptr()), c_size_t(4)))
print(tdt.acltdtAddDataItem(full, item))
print(tdt.acltdtCreateDataItem(0, None, c_size_t(1), 0, None, c_size_t(0)))
print(tdt.acltdtSendTensor(made, dataset(torch.ones(1)), 0), tdt.acltdtCleanChannel(made),
      size(made))
print(tdt.acltdtDestroyChannel(made), channel(b"one", 2) is not None)
"""
    )
    assert lines == [
        "None None None None",
        "None None",
        f"{INVALID} {INVALID}",
        f"{INVALID} sent 0",
        INVALID,
        "None",
        "0 0 0",
        "0 True",
    ]


def test_who_waits_for_a_channel_goes_on_with_a_message_at_a_limit_or_when_it_stops() -> None:
    lines = output_of(
        CHANNELS
        + """
made, taken = channel(b"waits", 2), c_void_p(tdt.acltdtCreateDataset())
sender = threading.Timer(0.2, lambda: tdt.acltdtSendTensor(made, dataset(torch.ones(1)), -1))
sender.start()
print(tdt.acltdtReceiveTensor(made, taken, -1), contents(taken))
begin = time.monotonic()
print(tdt.acltdtReceiveTensor(made, taken, 100), time.monotonic() - begin >= 0.1)
stopper = threading.Timer(0.2, lambda: tdt.acltdtStopChannel(made))
stopper.start()
print(tdt.acltdtReceiveTensor(made, taken, -1))
"""
    )
    assert lines == ["0 [([1], [1.0])]", f"{EMPTY} True", EMPTY]


def test_a_wait_for_a_channel_without_a_limit_ends_at_that_of_the_device() -> None:
    lines = output_of(
        CHANNELS + "print(tdt.acltdtReceiveTensor(channel(b'c', 2), dataset(), -1))",
        VNPU_WAIT_LIMIT="1",
    )
    assert lines == ["507046"]


def test_queues_take_data_of_a_size_and_leave_what_finds_no_room() -> None:
    lines = output_of(
        QUEUES
        + """
made = queue(b"data", 2)
print(put(made, b"first", b"tag"), put(made, b"second"), put(made, b"third"))
print(put(made, b"", b""), put(made, b"x", b"u" * 97))
print(get(made, room=4), get(made), get(made), get(made))
print(queue(b"data", 2), queue(b"few", 1), put(99, b"x"))
device = torch.tensor([65, 66, 67, 68], dtype=torch.uint8).to("npu")
torch.npu.synchronize()
address = c_void_p(device.data_ptr())
print(tdt.acltdtEnqueueData(made, address, c_size_t(4), None, c_size_t(0), 0, 0), get(made))
print(tdt.acltdtDestroyQueue(made), put(made, b"x"))
"""
    )
    assert lines == [
        f"0 0 {FULL}",
        f"{INVALID} {INVALID}",
        f"{INVALID} ('first', 'tag') ('second', '') {EMPTY}",
        f"-{INVALID} -{INVALID} 107017",
        "0 ('ABCD', '')",
        "0 107017",
    ]


def test_routes_pass_data_on_to_all_their_ends_once_each_has_room() -> None:
    lines = output_of(
        QUEUES
        + """
source, left, right = queue(b"source", 4), queue(b"left", 4), queue(b"right", 2)
bound = routes((source, left), (source, right))
print(tdt.acltdtBindQueueRoutes(bound))
print([put(source, text) for text in (b"0", b"1", b"2")])
print(get(left)[0], get(left)[0], get(left), get(right)[0])
print(get(left)[0], get(right)[0], get(right)[0], get(source))
print(tdt.acltdtDestroyQueue(left))
print(tdt.acltdtUnbindQueueRoutes(bound), tdt.acltdtUnbindQueueRoutes(bound))
print(put(source, b"3"), get(left), get(source)[0], tdt.acltdtDestroyQueue(left))
"""
    )
    assert lines == [
        "0",
        "[0, 0, 0]",
        f"0 1 {EMPTY} 0",
        f"2 1 2 {EMPTY}",
        FAILED,
        f"0 {FAILED}",
        f"0 {EMPTY} 3 0",
    ]


def test_routes_are_found_by_their_ends_and_close_no_circle() -> None:
    lines = output_of(
        QUEUES
        + """
a, b, c = queue(b"a", 2), queue(b"b", 2), queue(b"c", 2)
print(tdt.acltdtBindQueueRoutes(routes((a, b), (b, c))))
print(tdt.acltdtBindQueueRoutes(routes((c, a))), tdt.acltdtBindQueueRoutes(routes((a, b))))
def found(mode, **ends):
    query = c_void_p(tdt.acltdtCreateQueueRouteQueryInfo())
    for type_, value in enumerate((mode, ends.get("source"), ends.get("target"))):
        if value is None: continue
        number = c_uint32(value)
        assert tdt.acltdtSetQueueRouteQueryInfo(query, type_, c_size_t(4), byref(number)) == 0
    status = tdt.acltdtQueryQueueRoutes(query, made := routes())
    return tdt.acltdtGetQueueRouteNum(made) if status == 0 else status
print(found(0, source=a), found(1, target=c), found(2, source=a, target=c), found(100))
print(found(None), found(0), found(2, source=a), found(7))
"""
    )
    assert lines == ["0", f"{FAILED} {FAILED}", "1 1 0 0", " ".join([INVALID] * 4)]
