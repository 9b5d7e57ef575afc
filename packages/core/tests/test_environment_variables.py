"""Variables from earlier Ascend plugins are refused or reported, never passed over."""

import pytest

from vllm_davinci.core.config.environment_variables import INHERITED, check_inherited
from vllm_davinci.core.errors import ConfigurationError


def test_nothing_set_gives_no_notes():
    assert check_inherited({}) == []


def test_defaults_written_out_give_no_notes():
    assert check_inherited({variable.name: variable.default for variable in INHERITED}) == []


@pytest.mark.parametrize("variable", INHERITED, ids=lambda variable: variable.name)
def test_every_variable_is_refused_or_reported(variable):
    environ = {variable.name: "1"}
    if variable.is_refused:
        with pytest.raises(ConfigurationError, match=rf"Unset {variable.name}\."):
            check_inherited(environ)
    else:
        (note,) = check_inherited(environ)
        assert f"{variable.name}=1 has no effect" in note
