"""The functions that vLLM calls through entry points."""

import importlib.metadata

import pytest

from vllm_davinci_testing.processes.forked import run_alone

PRINT_PLATFORM = (
    "from vllm_davinci.meta import register_platform as r; import sys\n"
    "print(r(), r(), 'torch' in sys.modules)"
)


def test_vllm_sees_one_platform_and_one_general_plugin_of_one_name():
    for group, function in (
        ("vllm.platform_plugins", "register_platform"),
        ("vllm.general_plugins", "register_components"),
    ):
        (entry,) = importlib.metadata.entry_points(group=group, name="davinci")
        assert entry.value == f"vllm_davinci.meta.registration:{function}"
        assert callable(entry.load())


def test_all_of_our_plugins_have_the_name_that_vllm_plugins_selects_by():
    ours = [
        entry
        for entry in importlib.metadata.distribution("vllm-davinci").entry_points
        if entry.group.startswith("vllm.")
    ]
    assert len(ours) == 3
    assert {entry.name for entry in ours} == {"davinci"}


def test_without_a_device_the_platform_is_none_and_components_stay_out(run_without_device):
    done = run_without_device("-c", PRINT_PLATFORM)
    assert done.stdout.split() == ["None", "None", "False"], done.stderr
    done = run_without_device(
        "-c", "from vllm_davinci.meta import register_components as r; r(); print('returned')"
    )
    assert done.stdout.strip() == "returned", done.stderr


def test_with_a_device_the_platform_is_cores_and_torch_stays_unimported(run_on_vnpu):
    done = run_on_vnpu("-c", PRINT_PLATFORM)
    name = "vllm_davinci.core.platform.NPUPlatform"
    assert done.stdout.split() == [name, name, "False"], done.stderr


@pytest.mark.nightly("planning")
def test_another_vllm_ends_the_process_with_both_versions(run_on_vnpu, pretend_version):
    done = run_on_vnpu(
        "-c",
        "from vllm.platforms import current_platform; print(current_platform)",
        PYTHONPATH=pretend_version("vllm", "0.28.1"),
    )
    assert done.returncode == 1
    assert "vllm 0.28.1 is installed" in done.stderr
    assert "supports 0.33.x" in done.stderr


def test_registering_components_twice_is_harmless():
    ended = run_alone(
        "from vllm_davinci.meta import register_components as r; r(); r(); print('done')"
    )
    assert "done" in ended.stdout, ended.output
