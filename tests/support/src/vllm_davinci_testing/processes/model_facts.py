"""Fills vLLM's cache of facts about model classes, which an engine's configuration reads.

For a class that is not cached, vLLM imports itself in a new process, which takes 12 s of processor
time per architecture on a new machine. Here a fork of a process that has imported vLLM finds all
architectures' facts, in about 12 s.
"""

import importlib.util
import os
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def fill_cache() -> None:
    """Saves missing facts in VLLM_CACHE_ROOT/modelinfos, in a fork, and waits for the fork."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    status = 1
    try:
        _save_missing()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _save_missing() -> None:
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _ModelInfo
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    models = list(ModelRegistry.models.values())
    # Other processes may do the same: each begins elsewhere, and skips saved facts.
    random.Random(os.getpid()).shuffle(models)
    for model in models:
        if not isinstance(model, _LazyRegisteredModel):
            continue
        # Some need packages that are not installed, which vLLM reports when the model is used.
        with suppress(Exception):
            _save(model, _ModelInfo)


def _save(model: Any, facts: Any) -> None:
    spec = importlib.util.find_spec(model.module_name)
    if spec is None or spec.origin is None:
        return
    digest = model._get_modelinfo_module_hash(Path(spec.origin))
    if model._load_modelinfo_from_cache(digest) is None:
        model._save_modelinfo_to_cache(facts.from_model_cls(model.load_model_cls()), digest)
