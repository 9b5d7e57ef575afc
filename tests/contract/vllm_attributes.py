"""Runs an engine and prints, as JSON, every vLLM attribute that somebody else replaced.

`python tests/contract/vllm_attributes.py CHECKPOINT`, in a process of its own: each vLLM module is
recorded at the moment its own code has run, before anybody can get at it, and compared after
plugins were registered, a model was loaded and text was generated. What vLLM rebinds itself, and
says so with `global`, may change; what our hooks put into vLLM's registries changes no attribute.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MISSING = object()


class Recorder:
    """Keeps the attributes of every vLLM module, and of the classes it defines, as they were."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        self.classes: dict[type, dict[str, Any]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _RecordingLoader(spec.loader.name, spec.loader.path)
            spec.loader.recorder = self
        return spec

    def record(self, module: ModuleType) -> None:
        self.modules[module.__name__] = dict(vars(module))
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                self.classes[value] = dict(vars(value))

    def replaced(self) -> list[str]:
        """What differs from the record, without what vLLM changes itself."""
        found: list[str] = []
        for name, before in self.modules.items():
            module = sys.modules[name]
            found += _replaced_in(name, before, dict(vars(module)), module)
        for cls, before in self.classes.items():
            name = f"{cls.__module__}.{cls.__qualname__}"
            found += _replaced_in(name, before, dict(vars(cls)), sys.modules[cls.__module__])
        return sorted(found)


class _RecordingLoader(SourceFileLoader):
    recorder: Recorder

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.recorder.record(module)


def _replaced_in(
    name: str, before: dict[str, Any], now: dict[str, Any], module: ModuleType
) -> list[str]:
    attributes = [name for name in before.keys() | now.keys() if _differs(before, now, name)]
    if not attributes:
        return []
    own = names_it_rebinds(module)
    return [_described(name, a, before, now) for a in attributes if a not in own]


@cache
def names_it_rebinds(module: ModuleType) -> set[str]:
    """Names that a module's own code assigns after it was executed.

    `global NAME`, `cls.NAME = ...` and `ClassName.NAME = ...` inside functions.
    """
    path = module.__file__
    if path is None:
        return set()
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.attr for target in targets if isinstance(target, ast.Attribute))
    return names


def _differs(before: dict[str, Any], now: dict[str, Any], attribute: str) -> bool:
    was, is_now = before.get(attribute, MISSING), now.get(attribute, MISSING)
    if was is is_now:
        return False
    # A submodule becomes an attribute of its package when it is first imported; vLLM's packages
    # load some of their own names at first use.
    if was is MISSING:
        origin = is_now.__name__ if isinstance(is_now, ModuleType) else _origin(is_now)
        return origin.split(".")[0] not in {"vllm", "builtins", ""}
    # vLLM's LazyLoader stands for a module until first use, then puts the module in its place.
    is_own_stand_in = type(was).__module__ == "vllm.utils.import_utils"
    return not (is_own_stand_in and is_now is sys.modules.get(was.__name__))


def _origin(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _described(name: str, attribute: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    was, is_now = (side.get(attribute, "(absent)") for side in (before, now))
    return f"{name}.{attribute}: {was!r:.120} -> {is_now!r:.120}"


def main(checkpoint: str, alter: str = "") -> None:
    recorder = Recorder()
    sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
    from vllm import LLM, SamplingParams

    llm = LLM(model=checkpoint, seed=0, max_model_len=256)
    (output,) = llm.generate(["def "], SamplingParams(temperature=0, max_tokens=4))
    if alter:
        # Proves that the comparison sees a replaced attribute.
        module, attribute = alter.rsplit(".", 1)
        setattr(sys.modules[module], attribute, lambda *args, **kwargs: None)
    report = {
        "platform": type(sys.modules["vllm.platforms"].current_platform).__module__,
        "tokens": len(output.outputs[0].token_ids),
        "modules": len(recorder.modules),
        "attributes": sum(map(len, recorder.modules.values())),
        "replaced": recorder.replaced(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
