"""The activities that a worker's profiler records."""

from vllm_davinci.core.device.profiling import profiler_activities


def test_requested_activities_are_recorded_by_default_host_and_device() -> None:
    assert profiler_activities(["CPU"]) == ["CPU"]
    assert profiler_activities(None) == profiler_activities([]) == ["CPU", "PrivateUse1"]
