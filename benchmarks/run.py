"""Runs one benchmark: `python benchmarks/run.py GROUP/NAME [options] [--json FILE]`.

A benchmark is a module `benchmarks/GROUP/NAME.py` with `add_arguments(parser)` and `run(args) ->
Result`. `--list` lists all.
"""

import argparse
import ast
import difflib
import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rich.console import Console

from result import Result
from result_table import print_result

DIRECTORY = Path(__file__).resolve().parent


def available() -> dict[str, str]:
    """Maps each benchmark's name to the first line of its docstring, without importing it."""
    found = {}
    for path in sorted(DIRECTORY.glob("*/[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            described = (ast.get_docstring(tree) or "").split("\n")[0]
            found[f"{path.parent.name}/{path.stem}"] = described
    return found


def with_options(result: Result, name: str, given: argparse.Namespace) -> Result:
    """Returns the result with the benchmark's name, and its options among the settings."""
    asked = dict(vars(given))
    seed = asked.pop("seed", result.seed)
    return replace(result, benchmark=name, seed=seed, settings={**asked, **result.settings})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("name", nargs="?", metavar="GROUP/NAME")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("-h", "--help", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    benchmarks = available()
    console = Console()
    if options.list or (options.name is None and not options.help):
        for name, described in benchmarks.items():
            console.print(f"{name:32} {described}", markup=False)
        return 0
    if options.name is None:
        parser.print_help()
        return 0
    if options.name not in benchmarks:
        close = difflib.get_close_matches(options.name, benchmarks, n=1)
        hint = f"did you mean {close[0]}?" if close else "`--list` names them"
        print(f"no benchmark {options.name!r}: {hint}", file=sys.stderr)
        return 2

    benchmark = import_module(options.name.replace("/", "."))
    own_parser = argparse.ArgumentParser(
        prog=f"run.py {options.name}", description=benchmark.__doc__
    )
    benchmark.add_arguments(own_parser)
    given = own_parser.parse_args(["-h"] if options.help else rest)
    result = with_options(benchmark.run(given), options.name, given)
    print_result(result, console)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(result.to_json(), indent=2, default=str) + "\n", encoding="utf-8"
        )
        console.print(f"written to {options.json}", markup=False)
    missed = [row.name for row in result.rows if row.is_met is False]
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
