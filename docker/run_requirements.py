"""Prints the packages of pyproject.toml that a run needs, for `pip install`; not those of tests, docs and peers."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [package for extra in ("s3", "wandb", "images", "plot") for package in project["optional-dependencies"][extra]]
print("\n".join(["setuptools", *project["dependencies"], *extras]))
