"""Print the directory of an installed package without importing it."""

import importlib.util
import pathlib
import sys

name = sys.argv[1]
spec = importlib.util.find_spec(name)
if spec is None or spec.origin is None:
    sys.exit(f"{name} is not installed in {sys.executable}; pip install {name}==2.13.0")
print(pathlib.Path(spec.origin).parent)
