"""Compares two wheels of vLLM in the names that this repository stands on.

`upstream_hooks.py OLD_WHEEL NEW_WHEEL` runs where the packages work, with the old one installed.
Prints JSON: how many names were compared, and each method that ours override or name that we import
which is not what it was. The new wheel is read, and never imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

PACKAGES = ("vllm_davinci.core", "vllm_davinci.models", "vllm_davinci.meta")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Hook:
    """A name of vLLM that ours depend on.

    ours:   who does, as MODULE:NAME
    module: of vLLM, where it is defined
    name:   in that module; a method as CLASS.METHOD
    """

    ours: str
    module: str
    name: str
    is_overridden: bool


class Wheel:
    """The sources of one vLLM."""

    def __init__(self, path: Path) -> None:
        archive = zipfile.ZipFile(path)
        self._files = {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
            for name in archive.namelist()
            if name.startswith("vllm/") and name.endswith(".py")
        }
        self._sources = {module: archive.read(name) for module, name in self._files.items()}
        self._trees: dict[str, ast.Module] = {}

    def find(self, module: str, name: str) -> ast.AST | None:
        """The definition of a name, or the statement that binds it otherwise."""
        if module not in self._sources:
            return None
        if module not in self._trees:
            self._trees[module] = ast.parse(self._sources[module])
        scope: ast.AST | None = self._trees[module]
        for part in name.split("."):
            scope = None if scope is None else bindings(getattr(scope, "body", [])).get(part)
        return scope

    def file(self, module: str) -> str:
        """Where the wheel has a module."""
        return self._files.get(module, module)

    def has_module(self, name: str) -> bool:
        return name in self._sources

    def places(self, name: str) -> list[str]:
        """Modules that define a class or function of that name."""
        return [
            module
            for module, source in self._sources.items()
            if name.encode() in source and isinstance(self.find(module, name), DEFINITIONS)
        ]


def bindings(statements: list[ast.stmt]) -> dict[str, ast.AST]:
    """Names that a scope binds, also under `if`, `try` and `with`."""
    found: dict[str, ast.AST] = {}
    for node in statements:
        if isinstance(node, DEFINITIONS):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update({(a.asname or a.name).split(".")[0]: node for a in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found.update({n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)})
        for branch in ("body", "orelse", "finalbody"):
            if not isinstance(node, DEFINITIONS):
                found.update(bindings(getattr(node, branch, [])))
        for handler in getattr(node, "handlers", []):
            found.update(bindings(handler.body))
    return found


def hooks() -> Iterator[Hook]:
    """Methods that ours override, then names that we import."""
    for package in map(import_module, PACKAGES):
        for found in walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            module = import_module(found.name)
            yield from overrides(found.name, vars(module))
            yield from imports(found.name, Path(str(module.__file__)))


def overrides(module: str, names: dict[str, object]) -> Iterator[Hook]:
    for cls in names.values():
        if not (isinstance(cls, type) and cls.__module__ == module):
            continue
        for name in vars(cls):
            for base in cls.__mro__[1:]:
                if base.__module__.startswith("vllm.") and name in vars(base):
                    if callable(inspect.unwrap(getattr(base, name))):
                        place = f"{module}:{cls.__name__}.{name}"
                        yield Hook(place, base.__module__, f"{base.__name__}.{name}", True)
                    break


def imports(module: str, path: Path) -> Iterator[Hook]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield Hook(module, str(node.module), alias.name, False)


def change(hook: Hook, old: Wheel, new: Wheel) -> str | None:
    """Describes what has become of a hook; None where it is unchanged."""
    before, after = old.find(hook.module, hook.name), new.find(hook.module, hook.name)
    if before is None or (hook.name.startswith("__") and hook.name.endswith("__")):
        return None  # not written there: made by a decorator, or a module itself
    if after is None:
        if new.has_module(f"{hook.module}.{hook.name}"):
            return None
        owner = hook.name.split(".")[0]
        places = new.places(owner)
        if hook.is_overridden and hook.module in places:
            return f"{hook.name.split('.')[1]} is gone from {owner}, or comes from a base of it"
        return f"gone from there; {owner} is in {', '.join(places)}" if places else "gone"
    if not isinstance(before, DEFINITIONS) or not isinstance(after, DEFINITIONS):
        return None
    if isinstance(before, ast.ClassDef) or isinstance(after, ast.ClassDef):
        return parameters_changed(*(constructor(node) for node in (before, after)))
    told = parameters_changed(before, after)
    if told is None and hook.is_overridden and body(before) != body(after):
        return "its body is another"
    return told


def constructor(node: ast.AST) -> ast.AST | None:
    return bindings(getattr(node, "body", [])).get("__init__")


def parameters_changed(before: ast.AST | None, after: ast.AST | None) -> str | None:
    old, new = (parameters(node) for node in (before, after))
    lost = [name for name in old if name not in new]
    come = [text for name, text in new.items() if name not in old]
    if lost or come:
        changes = [f"without {name}" for name in lost] + [f"with {text}" for text in come]
        return f"parameters: {', '.join(changes)}"
    if list(old) != list(new):
        return f"parameters in another order: {', '.join(new)}"
    return None


def parameters(node: ast.AST | None) -> dict[str, str]:
    """By name, as they are written with their default."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        argument.arg: argument.arg + ("" if default is None else f"={ast.unparse(default)}")
        for argument, default in pairs
    }


def body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Without its docstring."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return [ast.dump(statement) for statement in statements]


def main() -> None:
    old, new = (Wheel(Path(argument)) for argument in sys.argv[1:3])
    compared = sorted(set(hooks()), key=lambda hook: (hook.module, hook.name, hook.ours))
    changes = [
        {**asdict(hook), "file": old.file(hook.module), "what": what}
        for hook in compared
        if (what := change(hook, old, new)) is not None
    ]
    json.dump({"compared": len(compared), "changes": changes}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
