"""The wheel, what it holds and a run by its command; and an editable install. Both in environments of their own."""

import json
import os
import shutil
import subprocess
import sys
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
def source(tmp_path_factory) -> Path:
    """A copy of the checkout, since setuptools writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    return source


def build(kind: str, source: Path) -> Path:
    """The file that `pip install` (wheel) or `pip install --editable` (editable) makes and installs."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({kind!r})"
    (source / kind).mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = (source / kind).iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    return build("wheel", source)


def test_the_wheel_holds_one_package_with_its_recipes_and_commands(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    version = gmlp_scale.__version__
    assert {name.partition("/")[0] for name in files} == {"gmlp_scale", f"gmlp_scale-{version}.dist-info"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    for folder in ("gmlp_scale", "launch", "data_prep"):
        sources = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
        assert {str(path if folder == "gmlp_scale" else "gmlp_scale" / path) for path in sources} <= files
    assert {f"gmlp_scale/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.yaml")} <= files
    templates = {"analysis/run_report.html", "export/card.md", "export/image_card.md", "science/page.md"}
    templates |= {"finetune/glue.md", "finetune/sweep.md"}
    assert {f"gmlp_scale/{name}" for name in ("py.typed", *templates)} <= files
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"gmlp-pretrain", "gmlp-finetune", "gmlp-evaluate", "gmlp-export", "gmlp-prepare"} <= commands.keys()
    table = (ROOT / "docs/commands.md").read_text()
    for command, target in commands.items():
        module, _, function = target.partition(":")
        script = f"{module.removeprefix('gmlp_scale.').replace('.', '/')}.py"
        assert f"| `{command}` | `python {script}` |" in table
        assert f"{module.replace('.', '/')}.py" in files and function == "main"


def environment_with(wheel: Path, folder: Path) -> Path:
    """A new environment's folder of programs. It has the wheel, and sees the packages that this environment has."""
    venv.create(folder)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "others.pth").write_text("\n".join(others) + "\n")
    return python.parent


def run_in(environment: Path, folder: Path, program: str, *arguments: object) -> str:
    """What a program of the environment prints, started in a folder that is far from the checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [environment / program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_command_runs_a_recipe_by_its_name(wheel, tmp_path):
    environment = environment_with(wheel, tmp_path / "environment")
    write_tiny_shards(tmp_path / "shards", [40], [8], sequence_length=64)
    find = "import importlib.util as u, json; print(json.dumps([str(u.find_spec(n)) for n in {names}]))"
    names = ["launch", "data_prep", "configs", "tests", "benchmarks", "gmlp_scale"]
    *others, ours = json.loads(run_in(environment, tmp_path, "python", "-c", find.format(names=names)))
    assert others == ["None"] * 5 and str(environment.parent) in ours
    run_in(environment, tmp_path, "gmlp-pretrain", "--config", "smoke", "data.shards=shards")
    assert (tmp_path / "outputs/smoke/checkpoints/step_000000020/DONE").is_file()


def test_an_editable_install_has_the_checkouts_commands_recipes_and_benchmarks(source, tmp_path):
    shutil.copytree(ROOT / "benchmarks", source / "benchmarks")
    environment = environment_with(build("editable", source), tmp_path / "environment")
    printed = run_in(environment, tmp_path, "gmlp-pretrain", "--config", "smoke", "--dry-run")
    assert "parameters" in printed
    for script in ("launch/plan.py", "data_prep/inspect_batch.py", "benchmarks/run.py", "benchmarks/gpu_proof.py"):
        assert run_in(environment, tmp_path, "python", source / script, "--help").startswith("usage: ")
    find = "import gmlp_scale.launch.plan as p; print(p.__file__)"
    assert run_in(environment, tmp_path, "python", "-c", find) == f"{source}/launch/plan.py\n"
