"""Reads the error of a refused configuration without starting an engine."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_davinci.core.features.feature import Engine, Feature
from vllm_davinci.core.features.registry import features, refusals
from vllm_davinci_testing.engines.engine_process import DEFAULTS, ENVIRONMENT


def refusal_of(model: Path, environment: Mapping[str, str] | None = None, **engine: Any) -> str:
    """Configures an engine as at its start; returns the error.

    model, engine: as EngineProcess takes them
    environment: variables to set meanwhile; the virtual device's have no effect, because this
    process has already read them
    """
    arguments = EngineArgs(model=str(model), **{**DEFAULTS, **engine})
    before = dict(os.environ)
    os.environ.update({**ENVIRONMENT, **(environment or {})})
    try:
        arguments.create_engine_config()
    except Exception as error:
        return str(error)
    finally:  # vLLM and our code set some of them
        os.environ.clear()
        os.environ.update(before)
    pytest.fail(f"{model.name} with {engine} is not refused")


def refused_by(rows: Collection[Feature], engine: Engine) -> str:
    """Returns the rows' refusals of an engine; its configuration needs only what the rows read."""
    keys = {key for row in rows for key in (row.key, *row.excludes)}
    asked = {key: features()[key] for key in keys if features()[key].is_asked(engine)}
    found = [each for row in rows if row.key in asked for each in refusals(row, asked, engine)]
    return " ".join(found)
