"""Variables of earlier Ascend plugins are applied or reported, never ignored."""

import pytest

from vllm_davinci.core.config.environment_variables import (
    OTHER_VARIABLES,
    hccl_buffer_mib,
    launches_kernels_of_vllm,
    unknown_variables,
    variables_without_effect,
)
from vllm_davinci.core.config.row import NoEffect, Row
from vllm_davinci.core.errors import ConfigurationError

NAME = "DAVINCI_TRITON_KERNELS"
WITHOUT_EFFECT = [row for row in OTHER_VARIABLES if isinstance(row.fate, NoEffect)]


def test_nothing_set_gives_no_notes():
    assert list(variables_without_effect({})) == []


def test_defaults_written_out_give_no_notes():
    assert list(variables_without_effect({row.key: row.default for row in OTHER_VARIABLES})) == []


@pytest.mark.parametrize("row", WITHOUT_EFFECT, ids=lambda row: row.key)
def test_a_variable_without_effect_is_reported(row: Row):
    (setting,) = variables_without_effect({row.key: "7"})
    assert setting.key == row.key
    assert setting.reason.startswith("has no effect: ")


def test_variables_of_earlier_plugins_and_of_vllm_are_known_and_typing_errors_get_the_nearest():
    set_here = {
        "VLLM_ASCEND_ENABLE_DBO": "1",
        "VLLM_ENABLE_MC2": "1",
        "VLLM_ASCEND_TRACE_RECOMPILES": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGING_LEVEL": "INFO",
        "VLLM_ASCEND_ENABLE_DB0": "1",
        "VLLM_Q": "1",
        "DAVINCI_Q": "1",
    }
    assert unknown_variables(["VLLM_LOGGING_LEVEL"], set_here) == [
        "Unknown environment variable VLLM_ASCEND_ENABLE_DB0. Did you mean VLLM_ASCEND_ENABLE_DBO?",
        "Unknown environment variable VLLM_LOGING_LEVEL. Did you mean VLLM_LOGGING_LEVEL?",
        "Unknown environment variable VLLM_Q.",
    ]


@pytest.mark.parametrize(("set_here", "mib"), [({}, 200), ({"HCCL_BUFFSIZE": "48"}, 48)])
def test_hccls_buffer_size_is_read_from_its_variable(set_here: dict[str, str], mib: int):
    assert hccl_buffer_mib(set_here) == mib


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5", "200MB", "²"])
def test_an_invalid_hccl_buffer_size_is_an_error(value: str):
    with pytest.raises(ConfigurationError) as caught:
        hccl_buffer_mib({"HCCL_BUFFSIZE": value})
    message = str(caught.value)
    assert f"HCCL_BUFFSIZE='{value}' is not valid" in message
    assert "a number of MiB, at least 1. Its default is 200" in message


def test_kernels_of_vllm_are_launched_only_where_a_backend_executes_them():
    assert not launches_kernels_of_vllm({}) and not launches_kernels_of_vllm({NAME: "own"})
    with pytest.raises(ConfigurationError, match=r"choose own .* or vllm"):
        launches_kernels_of_vllm({NAME: "theirs"})
    with pytest.raises(ConfigurationError, match="no Triton backend here executes kernels"):
        launches_kernels_of_vllm({NAME: "vllm"})
