"""Our subclasses of vLLM's classes accept every call that vLLM makes to the originals."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter
from types import ModuleType
from typing import Any

import pytest

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@pytest.fixture(scope="module")
def subclasses() -> list[type]:
    """Lists every class of core and models that has a vLLM class among its bases."""
    return sorted(
        {
            value
            for module in own_modules()
            for value in vars(module).values()
            if isinstance(value, type)
            and value.__module__ == module.__name__
            and any(is_vllms(base) for base in value.__mro__)
        },
        key=lambda cls: cls.__qualname__,
    )


def own_modules() -> Iterator[ModuleType]:
    for package_name in ("vllm_davinci.core", "vllm_davinci.models"):
        try:
            package = import_module(package_name)
        except ModuleNotFoundError as error:
            if error.name != package_name:
                raise
            continue
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package_name}."):
            if not found.name.endswith("__main__"):
                yield import_module(found.name)


def is_vllms(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "vllm"


def overrides(cls: type) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, our function and vLLM's function of each method that replaces vLLM's.

    A layer's `forward_oot` is compared with its `forward_native`, because CustomOp declares
    `forward_oot` with any arguments.
    """
    for name, value in vars(cls).items():
        ours = function_of(value)
        if ours is None:
            continue
        original = "forward_native" if name == "forward_oot" else name
        for base in cls.__mro__[1:]:
            if is_vllms(base) and (theirs := function_of(vars(base).get(original))) is not None:
                yield name, ours, theirs
                break


def function_of(value: Any) -> Any:
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    return value if inspect.isfunction(value) else None


def parameters_of(function: Any) -> dict[str, Parameter]:
    """Returns parameters by name, without `self` or `cls`."""
    parameters = dict(inspect.signature(function).parameters)
    return {name: p for name, p in parameters.items() if name not in {"self", "cls"}}


def mismatch(ours: Any, theirs: Any) -> str | None:
    """Returns why `ours` does not accept a call that `theirs` accepts, or None."""
    mine = parameters_of(ours)
    kinds = {parameter.kind for parameter in mine.values()}
    takes_any_keyword = Parameter.VAR_KEYWORD in kinds
    takes_any_position = Parameter.VAR_POSITIONAL in kinds
    positions = [name for name, parameter in mine.items() if parameter.kind in POSITIONAL]
    theirs_by_name = parameters_of(theirs)
    their_positions = [n for n, p in theirs_by_name.items() if p.kind in POSITIONAL]
    for index, name in enumerate(their_positions):
        is_in_place = index < len(positions) and positions[index] == name
        if not is_in_place and not (takes_any_position and takes_any_keyword):
            return f"parameter {name!r} is not at position {index}"
    for name, parameter in theirs_by_name.items():
        if parameter.kind is Parameter.KEYWORD_ONLY and name not in mine and not takes_any_keyword:
            return f"keyword {name!r} is not accepted"
    for name, parameter in mine.items():
        is_required = parameter.default is Parameter.empty and parameter.kind in (
            *POSITIONAL,
            Parameter.KEYWORD_ONLY,
        )
        their_own = theirs_by_name.get(name)
        if is_required and their_own is None:
            return f"parameter {name!r} is required and vLLM does not pass it"
        if is_required and their_own is not None and their_own.default is not Parameter.empty:
            return f"parameter {name!r} is required and has a default in vLLM"
    return None


def test_the_classes_that_vllm_asks_for_are_subclasses_of_its_own(subclasses: list[type]):
    names = {cls.__name__ for cls in subclasses}
    assert {"NPUPlatform", "NPUWorker", "NPUModelRunner", "NPUCommunicator"} <= names


# `__init__` is not compared for classes that only our code constructs, or vLLM by keywords.
CONSTRUCTED_IN_ONE_WAY = {
    "BlockSparseAttention",
    "HCCLTrainerInitInfo",
    "HCCLWeightTransferInitInfo",
    "Int8LinearMethod",
    "MiniMaxM3Model",
    "NPUDeepSeekMTP",
    "NPUDeepseekV4ForCausalLM",
    "NPUExpertMapManager",
    "NPUMiniMaxM3ForCausalLM",
    "QuantizedFusedMoEMethodBase",
}


def test_overrides_accept_every_call_that_the_originals_accept(subclasses: list[type]):
    wrong = [
        f"{cls.__module__}.{cls.__name__}.{name}: {reason}"
        for cls in subclasses
        for name, ours, theirs in overrides(cls)
        if not (name == "__init__" and cls.__name__ in CONSTRUCTED_IN_ONE_WAY)
        if (reason := mismatch(ours, theirs)) is not None
    ]
    assert not wrong


def test_abstract_methods_of_vllm_are_all_there(subclasses: list[type]):
    missing = {
        cls.__qualname__: sorted(cls.__abstractmethods__)
        for cls in subclasses
        # The V2 runner's parts are combined with the class that vLLM chooses.
        if getattr(cls, "__abstractmethods__", None)
        and not cls.__name__.endswith(("Base", "NPUModelState", "Drafter"))
    }
    assert not missing


@pytest.mark.parametrize(
    ("ours", "is_accepted"),
    [
        (lambda self, a, b=1: None, True),
        (lambda self, a, b=1, *, extra=None: None, True),
        (lambda self, *args, **kwargs: None, True),
        (lambda self, b, a=1: None, False),
        (lambda self, a: None, False),
        (lambda self, a, b: None, False),
        (lambda self, a, b=1, *, extra: None, False),
    ],
)
def test_the_comparison_tells_compatible_signatures_from_others(ours: Any, is_accepted: bool):
    def theirs(self: Any, a: int, b: int = 1) -> None: ...

    assert (mismatch(ours, theirs) is None) is is_accepted
