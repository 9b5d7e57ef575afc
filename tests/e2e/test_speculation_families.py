"""MTP layers of every supported family: drafts change no token."""

from pathlib import Path

import pytest

from vllm_davinci.core.features.speculation import MTP_SERVED
from vllm_davinci_testing.engines.fixture_types import Engines
from vllm_davinci_testing.engines.mtp_families import FAMILIES, write_mtp_family
from vllm_davinci_testing.engines.speculating import speculation, told

pytestmark = pytest.mark.nightly("layouts")

GRAPHS = {"enforce_eager": False}
DEFAULT = "Glm4MoeMTPModel"
# Their vLLM definitions wait for the device in each pass, which prevents a capture.
WAIT = {"ErnieMTPModel", "HYV3MTPModel"}


def test_every_family_has_a_case():
    # tested in test_speculation_models.py, test_{compressed,pooled}_attention.py
    elsewhere = {"DeepSeekMTPModel", "DeepseekV32MTPModel", "DeepSeekV4MTPModel"}
    elsewhere |= {"Glm5NextMTPModel"}
    assert {*FAMILIES} | elsewhere == {*MTP_SERVED}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == DEFAULT else [pytest.mark.thorough])
        for name in FAMILIES
    ],
)
def test_mtp_of_a_family_changes_no_token(name: str, drafting_engine: Engines, tmp_path: Path):
    checkpoint = write_mtp_family(name, tmp_path / "model")
    for options in ({}, GRAPHS):
        with drafting_engine(checkpoint, {**speculation("mtp", 2), **options}) as engine:
            drafted, accepted = told(engine)
            replays = engine.on_workers("draft_replays")[0]
        print(f"{name}: {accepted} of {drafted}")
        assert drafted > 500
        assert 0 < accepted < drafted
        assert bool(replays) == (bool(options) and name not in WAIT)
