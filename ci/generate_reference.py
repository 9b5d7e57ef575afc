"""Writes docs/reference and the operators' typed calls; `--check` fails if one is stale.

Run by `nox -s docs`, on the virtual NPU because core's configuration imports vLLM.
"""

import argparse
import ast
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "conformance"))
from page import conformance_page

from chip_rows import ROWS, chip_rows
from constraints_page import operator_constraints_page
from features_page import features_page
from reference_cells import GENERATED, cell

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
# Long pages that any checkout can write, so not in git.
NOT_IN_GIT = ("conformance.md", "operator_constraints.md", "virtual_operators.md")
CONFIG = "vllm_davinci.core.config"


def environment_variables_page(core: Any) -> str:
    """Writes the page of environment variables from each package's `environment_variables.py`.

    Our variables are assignments followed by a docstring. core has none; its rows describe
    variables of other Ascend plugins and of HCCL.
    """
    text = "# Environment variables\n\n" + GENERATED.format(
        source="packages/*/src/vllm_davinci/**/environment_variables.py"
    )
    for path in sorted(ROOT.glob("packages/*/src/vllm_davinci/**/environment_variables.py")):
        package = path.relative_to(ROOT).parts[1]
        names = _names_of_core(core) if package == "core" else _documented_names(path)
        rows = [f"| `{name}` | {cell(description)} |" for name, description in names]
        assert rows, f"{path.relative_to(ROOT)} documents no variable"
        text += f"## {package}\n\n| variable | meaning |\n| --- | --- |\n"
        text += "\n".join(rows) + "\n\n"
    return text.rstrip() + "\n"


def _documented_names(path: Path) -> Iterator[tuple[str, str]]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for assignment, following in pairwise(body):
        if not isinstance(assignment, ast.Assign | ast.AnnAssign):
            continue
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            continue
        value = assignment.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value, str(following.value.value)


def _names_of_core(core: Any) -> Iterator[tuple[str, str]]:
    for row in core.OTHER_VARIABLES:
        subject = "1" if hasattr(row.fate, "value") else f"A value other than `{row.default}`"
        yield row.key, f"{row.meaning} {subject} {row.fate.told()}."
    own = (core.HCCL_BUFFER, core.HCCL_LIMIT, core.ALLOCATOR, core.FAULT_REPORT)
    for row in (*own, core.TRITON_KERNELS):
        yield row.key, f"{row.meaning} Default {row.default}."


def configuration_page(table: Any, other_keys: tuple[Any, ...]) -> str:
    """Writes the page of options by section, and of other plugins' keys."""
    text = "# Configuration\n\n" + GENERATED.format(
        source="packages/core/src/vllm_davinci/core/config/options.py and other_keys.py"
    )
    text += (
        "vLLM's `additional_config`: JSON on the command line "
        "(`--additional-config '{\"key\": value}'`), a dictionary in Python. An unknown key is an "
        "error that names the nearest valid one. The same as a JSON schema: "
        "[configuration.schema.json](configuration.schema.json).\n\n"
    )
    rows = list(table.option_rows())
    for section, meaning in table.sections():
        title = f"`{section}`" if section else "Options without a section"
        text += f"## {title}\n\n{meaning}\n\n"
        inside = [row for row in rows if row.key.rpartition(".")[0] == section]
        if inside:
            text += "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        for row in inside:
            name = row.key.rpartition(".")[2]
            text += f"| `{name}` | {_option(table, row)}{_needs(row)} |\n"
        text += "\n" if inside else ""
    text += (
        "## Keys of other plugins and releases\n\nNone is ignored silently: a key without "
        "effect is logged, and a refused one ends the start unless its value is the default. "
        "`vllm-davinci config` shows those in use.\n\n| key | type | default | meaning "
        "| effect |\n| --- | --- | --- | --- | --- |\n"
    )
    for row in sorted(other_keys, key=lambda row: row.key):
        fate = row.fate.told()
        text += f"| `{row.key}` | {_option(table, row)} | {cell(fate[0].upper() + fate[1:])}. |\n"
    return text


def _option(table: Any, row: Any) -> str:
    """Formats the table cells of an option's type, default and meaning."""
    default = "" if row.default is ... else f"`{json.dumps(row.default)}`"
    return f"{cell(table.type_name(row.type))} | {default} | {cell(row.meaning)}"


def _needs(row: Any) -> str:
    """Formats a sentence on the options that a non-default value needs."""
    needed = [f"`{need.key}` = `{json.dumps(need.value)}`" for need in row.needs]
    return f" Needs {' and '.join(needed)}." if needed else ""


def compiled_operators_page(kernels: Any, host_operators: tuple[str, ...], reference: Any) -> str:
    """Writes the page of vllm-davinci-kernels' operators: arguments and launches."""
    text = "# Compiled operators\n\n" + GENERATED.format(
        source="packages/kernels/csrc/op_table.inc and packages/operators"
    )
    text += (
        "`torch.ops.vllm_davinci.*`, of `vllm-davinci-kernels`. One call of the first column "
        "launches the operators of CANN in the last (some of them only for some arguments); "
        "shapes are in `vllm_davinci.operators`. vllm-davinci-core uses them where the "
        "package is installed, unless `enable_compiled_operators` is false.\n\n"
        "| operator | what it computes | arguments | launches |\n| --- | --- | --- | --- |\n"
    )
    for name in (*kernels.operator_names(), *host_operators):
        described = (getattr(reference, name).__doc__ or "").split("\n\n")[0]
        arguments = ", ".join(inspect.signature(getattr(reference, name)).parameters)
        if name in host_operators:
            launches = "nothing: tensors in host memory"
        else:
            launches = ", ".join(kernels.launches(name)) or "copies on the device"
        text += f"| `{name}` | {cell(described)} | `{arguments}` | {launches} |\n"
    return text


def virtual_operators_page(rows: list[Any], constraints: list[Any]) -> str:
    """Writes the page of vnpu's operators: tier, arguments, number of rules."""
    rules = Counter(row.operator for row in constraints)
    text = "# Operators of the virtual NPU\n\n" + GENERATED.format(
        source="the rows of packages/vnpu/csrc/ops"
    )
    text += (
        f"{len(rows)} operators, each with GetWorkspaceSize. Tiers: T1 is plain PyTorch in model "
        "execution, T2 fused serving operators, T3 rare ones. The rules are in "
        "[operator_constraints.md](operator_constraints.md); how to add one: "
        "[add_an_operator.md](../guides/add_an_operator.md).\n\n"
        "| operator | tier | rules | arguments |\n| --- | --- | --- | --- |\n"
    )
    for row in rows:
        number = rules[row.operator] or ""
        arguments = cell(row.arguments.removeprefix("(").removesuffix(")"))
        text += f"| {row.operator} | {row.tier} | {number} | `{arguments}` |\n"
    return text


def pages() -> dict[Path, str]:
    """Yields every generated file with its content."""
    variables = environment_variables_page(import_module(f"{CONFIG}.environment_variables"))
    found = {REFERENCE / "environment_variables.md": variables}
    table = import_module(f"{CONFIG}.table")
    other_keys = import_module(f"{CONFIG}.other_keys").OTHER_KEYS
    found[REFERENCE / "configuration.md"] = configuration_page(table, other_keys)
    found[ROOT / ROWS] = chip_rows(import_module("vllm_davinci.vnpu.timing.chip_files"))
    rows_of_features = import_module("vllm_davinci.core.features.registry").features()
    found[REFERENCE / "features.md"] = features_page(
        rows_of_features.values(),
        import_module(f"{CONFIG}.architectures").ARCHITECTURES,
        import_module("vllm_davinci.core.features.feature").is_always,
    )
    kernels, compiled = import_module("vllm_davinci.kernels"), "vllm_davinci.kernels._C"
    found[REFERENCE / "compiled_operators.md"] = compiled_operators_page(
        import_module(compiled), kernels.HOST_OPERATORS, import_module("vllm_davinci.operators")
    )
    rows = import_module("vllm_davinci.vnpu.operator_rows")
    found[REFERENCE / "virtual_operators.md"] = virtual_operators_page(
        rows.declared(), rows.constraints()
    )
    operators = import_module(compiled).operator_names()
    launched = {f"aclnn{name}" for each in operators for name in kernels.launches(each)}
    found[REFERENCE / "operator_constraints.md"] = operator_constraints_page(
        rows.constraints(), launched
    )
    records = sorted((ROOT / "conformance").glob("*/results.json"))
    if records:
        found[REFERENCE / "conformance.md"] = conformance_page(
            [json.loads(path.read_text(encoding="utf-8")) for path in records]
        )
    schema = json.dumps(table.json_schema(), indent=2) + "\n"
    found[REFERENCE / "configuration.schema.json"] = schema
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is stale"
    )
    check = parser.parse_args().check
    stale = []
    for path, text in pages().items():
        if check and path.name in NOT_IN_GIT:
            continue
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is stale: run `nox -s docs`' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
