"""Compares, in two vLLM wheels, the names that this repository depends on.

`upstream_hooks.py OLD_WHEEL NEW_WHEEL FILE` runs in an environment with the old wheel. Writes JSON:
the number of names compared, and changes of overridden methods, imported names, attributes of vLLM
that our methods read from `self`, and Triton kernels with stand-ins. The new wheel is read but not
imported. Prints module names as progress.
"""

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

PACKAGES = tuple(f"vllm_davinci.{each}" for each in ("core", "models", "meta", "planner"))
OVERRIDDEN, IMPORTED, ATTRIBUTE, KERNEL = "overridden", "imported", "attribute", "kernel"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Hook:
    """A name of vLLM that our code depends on.

    ours:   the dependent code, as MODULE:NAME
    module: vLLM's module that defines it
    name:   name in that module; CLASS.NAME for a method or attribute
    kind:   OVERRIDDEN, IMPORTED, ATTRIBUTE or KERNEL
    """

    ours: str
    module: str
    name: str
    kind: str


class Wheel:
    """The sources in a vLLM wheel."""

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
        """Returns a name's definition, or the statement that binds it otherwise."""
        if module not in self._sources:
            return None
        if module not in self._trees:
            self._trees[module] = ast.parse(self._sources[module])
        scope: ast.AST | None = self._trees[module]
        for part in name.split("."):
            scope = None if scope is None else bindings(getattr(scope, "body", [])).get(part)
        return scope

    def has_attribute(self, module: str, name: str) -> bool:
        """True if a class binds an attribute, in its body or on `self`."""
        owner, _, attribute = name.partition(".")
        return attribute in attributes(self.find(module, owner))

    def file(self, module: str) -> str:
        """Returns the path of a module in the wheel."""
        return self._files.get(module, module)

    def has_module(self, name: str) -> bool:
        return name in self._sources

    def places(self, name: str) -> list[str]:
        """Returns modules that define a class or function of that name."""
        return [
            module
            for module, source in self._sources.items()
            if name.encode() in source and isinstance(self.find(module, name), DEFINITIONS)
        ]


def bindings(statements: list[ast.stmt]) -> dict[str, ast.AST]:
    """Returns names that a scope binds, also under `if`, `try` and `with`."""
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


def attributes(scope: ast.AST | None) -> set[str]:
    """Returns names that a class binds, in its body or on `self`."""
    body = getattr(scope, "body", [])
    stored = {name for node in body for name in of_self(node, ast.Store)}
    return {*bindings(body), *stored}


def of_self(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Returns attributes of `self` that a tree loads or stores."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def hooks(old: Wheel | None = None) -> Iterator[Hook]:
    """Returns all hooks: overridden methods, imported names, attributes and kernels.

    old: the installed wheel, whose classes bind the attributes
    """
    for package in map(import_module, PACKAGES):
        for found in walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            print(found.name, flush=True)
            module = import_module(found.name)
            path = Path(str(module.__file__))
            yield from overrides(found.name, vars(module))
            yield from imports(found.name, path)
            if old is not None:
                yield from read_attributes(found.name, vars(module), path, old)
    yield from kernels("vllm_davinci.core.triton_kernels.registration:STAND_INS")


def kernels(table: str) -> Iterator[Hook]:
    """Returns kernels with stand-ins. table: MODULE:NAME of a mapping from kernels' paths"""
    module, _, name = table.partition(":")
    for kernel in getattr(import_module(module), name):
        owner, _, own_name = kernel.rpartition(".")
        yield Hook(table, owner, own_name, KERNEL)


def read_attributes(
    module: str, names: dict[str, object], path: Path, old: Wheel
) -> Iterator[Hook]:
    """Returns attributes of `self` that our methods load and only a vLLM base class binds."""
    tree = bindings(ast.parse(path.read_text(encoding="utf-8")).body)
    for cls in names.values():
        if not (isinstance(cls, type) and cls.__module__ == module):
            continue
        for name in sorted(of_self(tree.get(cls.__name__, ast.Module([], [])), ast.Load)):
            for base in cls.__mro__[1:]:
                if not base.__module__.startswith("vllm."):
                    continue
                if old.has_attribute(base.__module__, f"{base.__name__}.{name}"):
                    place = f"{module}:{cls.__name__}"
                    yield Hook(place, base.__module__, f"{base.__name__}.{name}", ATTRIBUTE)
                    break


def overrides(module: str, names: dict[str, object]) -> Iterator[Hook]:
    for cls in names.values():
        if not (isinstance(cls, type) and cls.__module__ == module):
            continue
        for name in vars(cls):
            for base in cls.__mro__[1:]:
                if base.__module__.startswith("vllm.") and name in vars(base):
                    if callable(inspect.unwrap(getattr(base, name))):
                        place = f"{module}:{cls.__name__}.{name}"
                        yield Hook(place, base.__module__, f"{base.__name__}.{name}", OVERRIDDEN)
                    break


def imports(module: str, path: Path) -> Iterator[Hook]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield Hook(module, str(node.module), alias.name, IMPORTED)


def change(hook: Hook, old: Wheel, new: Wheel) -> str | None:
    """Describes a hook's change; None if it is unchanged."""
    if hook.kind == ATTRIBUTE:
        if new.has_attribute(hook.module, hook.name):
            return None
        owner, _, attribute = hook.name.partition(".")
        return f"{attribute} is no longer bound in {owner}, or in a base of it alone"
    before, after = old.find(hook.module, hook.name), new.find(hook.module, hook.name)
    if before is None or (hook.name.startswith("__") and hook.name.endswith("__")):
        return None  # defined by a decorator, or a module itself
    if after is None:
        if new.has_module(f"{hook.module}.{hook.name}"):
            return None
        owner = hook.name.split(".")[0]
        places = new.places(owner)
        if hook.kind == OVERRIDDEN and hook.module in places:
            return f"{hook.name.split('.')[1]} is gone from {owner}, or comes from a base of it"
        return f"gone from there; {owner} is in {', '.join(places)}" if places else "gone"
    if not isinstance(before, DEFINITIONS) or not isinstance(after, DEFINITIONS):
        return None
    if isinstance(before, ast.ClassDef) or isinstance(after, ast.ClassDef):
        return parameters_changed(*(constructor(node) for node in (before, after)))
    told = parameters_changed(before, after)
    if told is None and hook.kind in (OVERRIDDEN, KERNEL) and body(before) != body(after):
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
    """Returns a function's parameters by name, with their defaults as written."""
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
    """Returns a function's statements without its docstring."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return [ast.dump(statement) for statement in statements]


def compare(found: Iterable[Hook], old: Wheel, new: Wheel) -> dict[str, object]:
    compared = sorted(set(found), key=lambda hook: (hook.module, hook.name, hook.ours))
    changes = [
        {**asdict(hook), "file": old.file(hook.module), "what": what}
        for hook in compared
        if (what := change(hook, old, new)) is not None
    ]
    return {"compared": len(compared), "changes": changes}


def main() -> None:
    old, new = (Wheel(Path(argument)) for argument in sys.argv[1:3])
    result = compare(hooks(old), old, new)
    Path(sys.argv[3]).write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
