"""Finds mistakes in arguments before torch and vLLM are imported, which takes many seconds."""

import ast
import difflib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Modules in which vLLM defines the options of `vllm serve`: fields of classes, and names in calls.
_STATED_IN = ("engine/arg_utils.py", "entrypoints/common/cli_args.py")


def problem_of_engine(model: str, engine_arguments: Sequence[str]) -> str | None:
    """Says why no engine can have this model and these options; None leaves the check to vLLM."""
    return missing_directory(model) or unknown_option(engine_arguments)


def missing_directory(model: str) -> str | None:
    """A message if `model` is a path that does not exist; None for existing paths, names on the hub
    and addresses."""
    if "://" in model:
        return None
    path = Path(model).expanduser()
    is_path = model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1
    if path.exists() or not (is_path or (path.parent != Path() and path.parent.is_dir())):
        return None
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, beside, n=1)
    hint = f" Did you mean {path.parent / nearest[0]}?" if nearest else ""
    return f"there is no {model}.{hint}"


def unknown_option(arguments: Sequence[str]) -> str | None:
    """A message with the first unknown option of `vllm serve` and the nearest valid one."""
    known = option_names()
    for argument in arguments:
        if not argument.startswith("--") or argument == "--":
            continue
        option = argument.partition("=")[0].partition(".")[0]
        name = option.removeprefix("--").replace("_", "-")
        # argparse accepts prefixes of names. vLLM accepts `--no-` before a switch, and
        # `--disable-x` for `--enable-x` and vice versa.
        switch, _, rest = name.partition("-")
        opposite = {"disable": f"enable-{rest}", "enable": f"disable-{rest}"}.get(switch, name)
        if any(each.startswith((name, name.removeprefix("no-"), opposite)) for each in known):
            continue
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        return f"vllm serve has no option {option}. Did you mean --{nearest}?"
    return None


@cache
def option_names() -> frozenset[str]:
    """Every option of `vllm serve` without dashes, and some names that are not options.

    They are read from vLLM's sources, because importing those takes seconds.
    """
    spec = find_spec("vllm")
    names: set[str] = set()
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for file in _STATED_IN:
            for node in ast.walk(ast.parse((Path(folder) / file).read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                    names |= {each.id for each in fields if isinstance(each, ast.Name)}
                elif isinstance(node, ast.Constant) and str(node.value).startswith("--"):
                    names.add(str(node.value).removeprefix("--"))
    return frozenset(name.replace("_", "-") for name in names)
