"""Limits of streams and events per device, and the resources that they hold."""

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of


def test_a_device_has_as_many_streams_as_its_chip() -> None:
    """Streams of captured graphs count from the first replay on."""
    lines = output_of(
        """
        import ctypes, torch
        torch.npu.set_device(0)
        acl, streams = ctypes.CDLL("libascendcl.so"), []
        x, graph = torch.ones(4).npu(), torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + x
        while True:
            stream = ctypes.c_void_p()
            status = acl.aclrtCreateStream(ctypes.byref(stream))
            if status:
                break
            streams.append(stream)
        print(status, 1900 < len(streams) < 1984)
        try:
            graph.replay()
        except RuntimeError as error:
            print("EE1023" in str(error))
        acl.aclrtDestroyStream(streams.pop())
        graph.replay()
        print(y[0].item())
        print(acl.aclrtCreateStream(ctypes.byref(stream)))
        """,
        VirtualDeviceConfig(soc="Ascend910B3"),
    )
    assert lines == ["207005 True", "True", "2.0", "207005"]


def test_a_device_has_as_many_events_as_its_chip() -> None:
    """Counts events that hold a resource permanently; ordinary events hold one until they
    complete.
    """
    lines = output_of(
        """
        import ctypes, torch
        torch.npu.set_device(0)
        acl = ctypes.CDLL("libascendcl.so")
        def made(create, *flags):
            event = ctypes.c_void_p()
            return create(ctypes.byref(event), *flags), event
        held = []
        while (new := made(acl.aclrtCreateEventWithFlag, 1))[0] == 0:
            held.append(new[1])
        print(new[0], len(held))
        usual = [made(acl.aclrtCreateEventExWithFlag, 1)[1] for _ in range(2000)]
        acl.aclrtDestroyEvent(held.pop())
        for event in usual:
            assert acl.aclrtRecordEvent(event, None) == 0
        _, first = made(acl.aclrtCreateEvent)
        print(acl.aclrtRecordEvent(first, None), made(acl.aclrtCreateEventWithFlag, 1)[0])
        """,
        VirtualDeviceConfig(soc="Ascend310P3"),
    )
    assert lines == ["207007 1023", "0 207007"]


def test_a_graph_holds_an_event_for_each_record_from_its_first_replay_on() -> None:
    lines = output_of(
        """
        import ctypes, torch
        from vllm_davinci.vnpu import _C
        torch.npu.set_device(0)
        acl, events = ctypes.CDLL("libascendcl.so"), []
        x, graph, side = torch.ones(4).npu(), torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph):
            main = torch.npu.current_stream()
            side.wait_stream(main)
            with torch.npu.stream(side):
                y = x + x
            main.wait_stream(side)
        print(_C.graph_holdings())
        while not acl.aclrtCreateEventWithFlag(ctypes.byref(event := ctypes.c_void_p()), 1):
            events.append(event)
        acl.aclrtDestroyEvent(events.pop())
        try:
            graph.replay()
        except RuntimeError as error:
            print("EE1023: 2 more events" in str(error))
        acl.aclrtDestroyEvent(events.pop())
        graph.replay()
        print(y[0].item())
        torch.npu.synchronize()
        del graph
        print(_C.graph_holdings()["events"])
        """,
        VirtualDeviceConfig(soc="Ascend910B3"),
    )
    held = {"graphs": 1, "streams": 2, "events": 2, "updatable_tasks": 0}
    assert lines == [str(held), "True", "2.0", "0"]
