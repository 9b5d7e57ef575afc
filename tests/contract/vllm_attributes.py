"""Runs an engine and prints every vLLM attribute that other code replaced, as a line of JSON.

Usage: `python tests/contract/vllm_attributes.py CHECKPOINT OPTIONS [ALTERED ...]`. Records each
    vLLM module right after its code has run, and compares it after plugins were registered, a model
    was loaded and text was generated. Then replaces the ALTERED attributes and compares again, to
    prove that replacements are detected. A module's own functions may rebind names that they
    declare `global`; assignments from other modules are always reported. Entries of our hooks in
    vLLM's registries change no attribute, except Triton kernels, which vLLM's own hook replaces by
    stand-ins.
"""

import ast
import json
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MISSING = object()
# Marks the report among vLLM's lines.
REPORT = "vllm_attributes: "
# Length of the prompt in tokens: enough that steps are split.
PROMPT_TOKENS = 200
# Modules that serving must not import.
OFFLINE = "vllm_davinci.core.export"


class Recorder:
    """Keeps the original attributes of every vLLM module, and of its classes."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        self.classes: dict[type, dict[str, Any]] = {}
        self.from_outside: list[str] = []

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
        if type(module) is ModuleType:
            module.__class__ = _watched_module(self)

    def replaced(self) -> list[str]:
        """Lists differences from the record, without names that modules rebind themselves."""
        found = list(self.from_outside)
        for name, before in self.modules.items():
            own = names_it_rebinds(sys.modules[name])
            found += _replaced_in(name, before, dict(vars(sys.modules[name])), own)
        for cls, before in self.classes.items():
            name = f"{cls.__module__}.{cls.__qualname__}"
            found += _replaced_in(name, before, dict(vars(cls)), frozenset())
        return sorted(found)


class _RecordingLoader(SourceFileLoader):
    recorder: Recorder

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.recorder.record(module)


@cache
def _watched_module(recorder: Recorder) -> type[ModuleType]:
    """Returns a module class that records assignments by other modules."""

    class WatchedModule(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            by = sys._getframe(1).f_globals.get("__name__", "")
            # Importing a submodule binds it in its package.
            is_import = isinstance(value, ModuleType) and by == "importlib._bootstrap"
            if by.split(".")[0] != "vllm" and not is_import:
                recorder.from_outside.append(f"{self.__name__}.{name}: assigned by {by}")
            super().__setattr__(name, value)

    return WatchedModule


def _replaced_in(
    name: str, before: dict[str, Any], now: dict[str, Any], own: frozenset[str]
) -> list[str]:
    attributes = [name for name in before.keys() | now.keys() if _differs(before, now, name)]
    return [_described(name, a, before, now) for a in attributes if a not in own]


@cache
def names_it_rebinds(module: ModuleType) -> frozenset[str]:
    """Returns names that a module's functions declare `global` and assign."""
    if module.__file__ is None:
        return frozenset()
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return frozenset(
        name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    )


def _differs(before: dict[str, Any], now: dict[str, Any], attribute: str) -> bool:
    was, is_now = before.get(attribute, MISSING), now.get(attribute, MISSING)
    if was is is_now:
        return False
    # The first import of a submodule makes it an attribute of its package; vLLM's packages load
    # some of their own names at first use.
    if was is MISSING:
        origin = is_now.__name__ if isinstance(is_now, ModuleType) else _origin(is_now)
        return origin.split(".")[0] not in {"vllm", "builtins", ""}
    if is_stand_in(was, is_now):
        return False
    # vLLM's LazyLoader stands for a module until first used, then replaces itself.
    is_own_stand_in = type(was).__module__ == "vllm.utils.import_utils"
    return not (is_own_stand_in and is_now is sys.modules.get(was.__name__))


def is_stand_in(kernel: Any, now: Any) -> bool:
    """True if vLLM's hook has replaced this kernel by the platform's registered stand-in."""
    dispatcher = sys.modules.get("vllm.triton_utils.dispatcher")
    return (
        dispatcher is not None
        and type(now) is dispatcher.KernelOverride
        and (kernel, now.func) in dispatcher._registry.values()
    )


def _origin(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _described(name: str, attribute: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    was, is_now = (side.get(attribute, "(absent)") for side in (before, now))
    return f"{name}.{attribute}: {was!r:.120} -> {is_now!r:.120}"


def _alter(path: str) -> None:
    """Replaces the attribute that MODULE:NAME or MODULE:CLASS.NAME names."""
    module, _, names = path.partition(":")
    *holders, attribute = names.split(".")
    target: Any = sys.modules[module]
    for holder in holders:
        target = getattr(target, holder)
    setattr(target, attribute, lambda *args, **kwargs: None)


def main(checkpoint: str, options: str, *altered: str) -> None:
    recorder = Recorder()
    sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
    from vllm import LLM, SamplingParams

    llm = LLM(model=checkpoint, seed=0, max_model_len=256, **json.loads(options))
    prompts = [
        {"prompt_token_ids": [3 + (token + first) % 500 for token in range(PROMPT_TOKENS)]}
        for first in range(4)
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    decisions = llm.collective_rpc("overlap_decisions")[0]
    replaced = recorder.replaced()
    for path in altered:
        _alter(path)
    report = {
        "platform": type(sys.modules["vllm.platforms"].current_platform).__module__,
        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
        "split_steps": decisions.get("split", 0),
        "quantization": llm.llm_engine.vllm_config.model_config.quantization,
        "modules": len(recorder.modules),
        "offline": [name for name in sys.modules if name.startswith(OFFLINE)],
        "replaced": replaced,
        "replaced_after_altering": recorder.replaced(),
    }
    print(REPORT + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
