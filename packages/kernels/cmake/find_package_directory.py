"""Print the directory of an installed package without importing it."""

import importlib.util
import pathlib
import sys

name = sys.argv[1]
spec = importlib.util.find_spec(name)
if spec is None or spec.origin is None:
    sys.exit(
        f"{name} is not installed in {sys.executable}; install the version that `requires` in "
        "pyproject.toml names"
    )
print(pathlib.Path(spec.origin).parent)
