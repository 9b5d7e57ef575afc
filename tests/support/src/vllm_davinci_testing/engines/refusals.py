"""Reads a refused configuration's error without starting an engine."""

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
    """Configures an engine as its start does, and returns the resulting error.

    model, engine: as EngineProcess takes them
    environment:   variables to set meanwhile, except those of the virtual device, which this
                   process has read at its first use
    """
    arguments = EngineArgs(model=str(model), **{**DEFAULTS, **engine})
    before = dict(os.environ)
    os.environ.update({**ENVIRONMENT, **(environment or {})})
    try:
        arguments.create_engine_config()
    except Exception as error:
        return str(error)
    finally:  # vLLM and we set some
        os.environ.clear()
        os.environ.update(before)
    pytest.fail(f"{model.name} with {engine} is not refused")


def refused_by(rows: Collection[Feature], engine: Engine) -> str:
    """Returns the rows' refusals of an engine, whose configuration needs only what they read."""
    keys = {key for row in rows for key in (row.key, *row.excludes)}
    asked = {key: features()[key] for key in keys if features()[key].is_asked(engine)}
    found = [each for row in rows if row.key in asked for each in refusals(row, asked, engine)]
    return " ".join(found)
