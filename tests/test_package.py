"""The wheel: what it holds, and a run of smoke.yaml by its command in a new environment, far from the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import gmlp_scale
from tests.written_shards import write_tiny_shards

ROOT = Path(__file__).parent.parent
PACKAGED = ("gmlp_scale", "launch", "data_prep", "configs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since setuptools writes beside its sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.iterdir()
    return wheel


def test_the_wheel_holds_one_package_with_its_recipes_and_commands(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    version = gmlp_scale.__version__
    assert {name.partition("/")[0] for name in files} == {"gmlp_scale", f"gmlp_scale-{version}.dist-info"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    for folder in ("gmlp_scale", "launch", "data_prep"):
        sources = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
        assert {str(path if folder == "gmlp_scale" else "gmlp_scale" / path) for path in sources} <= files
    assert {f"gmlp_scale/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.yaml")} <= files
    assert {"gmlp_scale/py.typed", "gmlp_scale/analysis/run_report.html"} <= files
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"gmlp-pretrain", "gmlp-finetune", "gmlp-evaluate", "gmlp-export", "gmlp-prepare"} <= commands.keys()
    table = (ROOT / "docs/commands.md").read_text()
    for command, target in commands.items():
        module, _, function = target.partition(":")
        script = f"{module.removeprefix('gmlp_scale.').replace('.', '/')}.py"
        assert f"| `{command}` | `python {script}` |" in table
        assert f"{module.replace('.', '/')}.py" in files and function == "main"


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment's folder of programs. It has the wheel, and sees the packages that this environment has."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_the_installed_command_runs_a_recipe_by_its_name(environment, tmp_path):
    write_tiny_shards(tmp_path / "shards", [40], [8], sequence_length=64)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [environment / program, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    find = "import importlib.util as u, json; print(json.dumps([str(u.find_spec(n)) for n in {names}]))"
    found = run("python", "-c", find.format(names=["launch", "data_prep", "configs", "tests", "gmlp_scale"]))
    *others, ours = json.loads(found.stdout)
    assert others == ["None"] * 4 and str(environment.parent) in ours
    done = run("gmlp-pretrain", "--config", "smoke", "data.shards=shards")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs/smoke/checkpoints/step_000000020/DONE").is_file()
