"""README is short and true: its commands and those of docs work, and its reading order takes an hour."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.forked import Script

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)]
LINES = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
COMMANDS = list(
    dict.fromkeys(line.split("  #")[0].strip() for line in LINES if line.strip() and not line.startswith("#"))
)
PRETRAIN = [command for command in COMMANDS if "launch/pretrain.py" in command]


def test_readme_is_short_and_begins_with_two_commands():
    assert len(README.split()) <= 1300
    assert COMMANDS[:2] == ["make demo", "make test"] and PRETRAIN


def test_links_of_readme_lead_to_files():
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert len(links) > 15 and not [link for link in links if not (ROOT / link).is_file()]


def test_the_reading_order_takes_an_hour():
    """A file without a folder lies in the folder of the file before it."""
    numbered = re.findall(r"^\d+\. (.*?): ", README, re.MULTILINE)
    files = [Path(name) for line in numbered for name in re.findall(r"`(\S+\.py)`", line)]
    for index, file in enumerate(files):
        files[index] = file if file.parent.name else files[index - 1].parent / file
    assert len(files) == 16
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 2000


def test_every_room_is_named():
    rooms = README.partition("| room |")[2]
    names = [init.parent.name for init in (ROOT / "gmlp_scale").glob("*/__init__.py")]
    assert names and not [name for name in names if not re.search(rf"\b{name}\b", rooms)]


@cache
def help_of(script: str) -> str:
    assert (ROOT / script).read_text().endswith('if __name__ == "__main__":\n    sys.exit(main())\n')
    code, printed, errors = Script(script, ["--help"]).end()
    assert code == 0, errors
    return printed


@pytest.mark.parametrize("command", COMMANDS)
def test_scripts_and_recipes_exist_and_know_their_options(command):
    words = shlex.split(command)
    for word in words:
        if word.startswith(("launch/", "data_prep/", "benchmarks/", "configs/")):
            assert any(path.is_file() for path in ROOT.glob(re.sub(r"\$\{?\w+\}?", "*", word))), word
    script = next((word for word in words if word.endswith(".py")), None)
    if script and script not in ("launch/pretrain.py",):
        shown = help_of(script)
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{script} has no {option}"


@pytest.mark.parametrize("command", PRETRAIN)
def test_pretraining_commands_pass_a_dry_run(command):
    words = shlex.split(command)
    world_size = "32" if "--hostfile" in words else "1"
    arguments = [*words[words.index("launch/pretrain.py") + 1 :], "--dry-run", "--ranks", world_size]
    code, _, errors = Script("launch/pretrain.py", arguments).end()
    assert code == 0, errors


@pytest.mark.parametrize("options", re.findall(r"python -m pytest (-.*)", (ROOT / "Makefile").read_text()))
def test_options_of_the_makefile_are_known(options):
    """`--faults FILE` was not, once the file was there: pytest then took it for a folder of tests."""
    command = [sys.executable, "-m", "pytest", *options.split(), "--markers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
