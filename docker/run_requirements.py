"""Prints what a run needs of pyproject.toml, for `pip install`: not what tests, documentation and peers need."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [package for extra in ("s3", "wandb", "images", "plot") for package in project["optional-dependencies"][extra]]
print("\n".join(["setuptools", *project["dependencies"], *extras]))
