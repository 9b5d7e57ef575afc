"""Variables from earlier Ascend plugins are served or reported, never passed over."""

import pytest

from vllm_davinci.core.config.environment_variables import (
    INHERITED,
    EnvironmentVariable,
    check_inherited,
)


def test_nothing_set_gives_no_notes():
    assert check_inherited({}) == []


def test_defaults_written_out_give_no_notes():
    assert check_inherited({variable.name: variable.default for variable in INHERITED}) == []


@pytest.mark.parametrize("variable", INHERITED, ids=lambda variable: variable.name)
def test_a_variable_without_effect_is_reported(variable: EnvironmentVariable):
    (note,) = check_inherited({variable.name: "1"})
    assert f"{variable.name}=1 has no effect" in note
