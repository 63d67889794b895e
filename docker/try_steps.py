"""Runs the steps of docker/Dockerfile in a clean Debian root, for machines without Docker. As root, with debootstrap:

    python docker/try_steps.py /var/tmp/image [--bind DIR ...]

The root has Debian's own Python instead of the base image's. It is left there for a look; `rm -r` removes it. The last
step is a dry run as the image's user. --bind shows a folder of this machine, such as a mirror, at its place inside.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = "python3 python3-venv python3-dev ca-certificates"
TRY = "python launch/pretrain.py --config configs/pretrain/gmlp_base.yaml --dry-run --ranks 8"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the root is made; it must not exist")
    parser.add_argument("--bind", nargs="*", default=[], type=Path, help="folders or files to show inside")
    options = parser.parse_args()
    root = options.folder
    if os.getuid() or root.exists():
        parser.error(f"run it as root, with a folder that does not exist yet: {root}")
    run("debootstrap", "--variant=minbase", f"--include={PYTHON.replace(' ', ',')}", "bookworm", root)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    mounted = [Path("/proc"), Path("/dev"), Path("/etc/resolv.conf"), *options.bind]
    try:
        for place in mounted:
            inside = root / place.relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.mkdir(exist_ok=True) if place.is_dir() else inside.touch()
            run("mount", "--bind", place, inside)
        run_steps(root)
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", root / place.relative_to("/")], check=False)
    return 0


def run_steps(root: Path) -> None:
    user, folder, environment = "root", "/", {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    for step, text in [*steps(), ("RUN", TRY)]:
        print(f"== {step} {text}", flush=True)
        match step:
            case "USER":
                user = text
            case "WORKDIR":
                folder = text
            case "ENV":
                for pair in shlex.split(text):
                    name, _, value = pair.partition("=")
                    environment[name] = value.replace("$PATH", environment["PATH"])
            case "COPY":
                *sources, target = [word for word in shlex.split(text) if not word.startswith("--")]
                copy(sources, root / folder.lstrip("/") / target)
                run("chroot", root, "chown", "-R", f"{user}:", folder)
            case "RUN":
                variables = [f"{name}={value}" for name, value in environment.items()]
                command = ["env", "-i", f"HOME=/home/{user}", *variables, "sh", "-c", f"cd {folder} && {text}"]
                run("chroot", f"--userspec={user}:", root, *command)
            case other:
                assert other == "FROM", f"{other} is not known here: add it"


def steps() -> list[tuple[str, str]]:
    """(instruction, its text), without comments, with continued lines joined."""
    text = (ROOT / "docker/Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(step, rest) for step, _, rest in (line.partition(" ") for line in lines) if step]


def copy(sources: list[str], target: Path) -> None:
    """Copies as Docker does: without what .dockerignore names."""
    if sources == ["."]:
        ignored = [f"--exclude=.{line}" for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "/"]
        packed = subprocess.Popen(["tar", "--create", *ignored, "--exclude=__pycache__", "."], cwd=ROOT, stdout=-1)
        subprocess.run(["tar", "--extract", "--no-same-owner"], cwd=target, stdin=packed.stdout, check=True)
        assert packed.wait() == 0
    else:
        run("cp", *[ROOT / source for source in sources], target)


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    sys.exit(main())
