"""Schemes by name: an unknown or incomplete scheme is an error."""

from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.floats_at_load import FloatsAtLoadLinearMethod
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.scheme import (
    FLOAT,
    SCHEMES,
    LayerSettings,
    Layout,
    Scheme,
    computing_scheme,
    find_scheme,
)
from vllm_davinci.core.quantization.tensors import INT8_WEIGHT

# Other tests in this process register schemes.
OURS = sorted(name for name in SCHEMES if SCHEMES[name].__module__.startswith("vllm_davinci.core."))


class Unfinished(Scheme):
    """A scheme with a name and tensors, but without linear or experts methods."""

    name = "W8A8_NEW"
    parameters = (INT8_WEIGHT,)


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SCHEMES.register(Unfinished)
    yield
    del SCHEMES.read()[Unfinished.name]


def build(prefix: str, kind: str) -> torch.nn.Module:
    described = AscendQuantizationConfig(QuantDescription.parse({f"{prefix}.weight": kind}))
    return ReplicatedLinear(64, 64, quant_config=described, prefix=prefix)


@pytest.mark.usefixtures("unfinished", "one_rank")
def test_a_scheme_without_a_method_is_an_error_and_no_other_scheme():
    register()
    with pytest.raises(UnsupportedFeatureError, match=r"^p is W8A8_NEW.*linear_method") as error:
        build("p", Unfinished.name)
    assert "W8A8_DYNAMIC" in str(error.value)  # suggested instead of an export
    with pytest.raises(UnsupportedFeatureError, match="experts_method"):
        Unfinished().experts(None, "experts", LayerSettings())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match=r"\(floats\)"):
        Unfinished().floats(lambda name: torch.ones(1))
    with pytest.raises(UnsupportedFeatureError, match=r"\(rounded\)"):
        Unfinished().rounded(FloatLayer(torch.ones(1, 1), torch.bfloat16))


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    with pytest.raises(UnsupportedFeatureError, match=r"Did the export mean W4A16\?") as error:
        find_scheme("W4A61", "p.weight")
    assert "p.weight has quantization type 'W4A61'" in str(error.value)


def test_a_name_is_registered_once():
    class Other(Unfinished):
        name = "W8A8"

    with pytest.raises(ValueError, match=r"registers W8A8, which .*schemes\.w8a8 has"):
        SCHEMES.register(Other)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", OURS)
def test_every_scheme_computes_by_methods_of_its_own(name: str):
    register()
    scheme = computing_scheme(name, "p.weight")
    assert find_scheme(name, "p.weight").stored(Layout())[0].name == "weight"
    assert scheme.computed_as == ""
    method = scheme.linear("p", LayerSettings())
    if name == FLOAT:
        assert not isinstance(method, QuantizedLinearMethodBase)
        return
    assert isinstance(method, QuantizedLinearMethodBase)
    assert method.scheme.name == scheme.name
    assert type(method) is not FloatsAtLoadLinearMethod
