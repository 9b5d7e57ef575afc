"""The activities that a worker's profiler records."""

from vllm_davinci.core.device.profiling import profiler_activities


def test_those_asked_for_are_recorded_and_else_the_host_s_and_the_device_s() -> None:
    assert profiler_activities(["CPU"]) == ["CPU"]
    assert profiler_activities(None) == profiler_activities([]) == ["CPU", "PrivateUse1"]
