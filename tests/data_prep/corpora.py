"""Texts and small corpora, and the scripts run as a user runs them."""

import gzip
import json
from pathlib import Path

from tests.forked import Script, fork_server

REPOSITORY = Path(__file__).parents[2]
WITH_WORKERS = ("tokenize_corpus.py", "prepare_images.py")
SENTENCE = "the cat and a dog went over to see what some people of that town had done with their old ship at sea"


def make_texts(count: int, seed: int = 0) -> list[str]:
    words = SENTENCE.split()
    lines = (" ".join(words[(i * 7 + k * k + seed) % len(words)] for k in range(5 + i % 60)) for i in range(count))
    return [f"{line}, number {i} of {seed}: naïve.\n" for i, line in enumerate(lines)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text, "url": "x"}, ensure_ascii=False) + "\n" for text in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def run(script: str, *arguments: object, code: int = 0, **options) -> str:
    """Output of a script that must end with `code`."""
    prepare = fork_server if script in WITH_WORKERS else None
    found, printed, errors = Script(f"data_prep/{script}", arguments, prepare=prepare, **options).end()
    assert found == code, f"{printed}\n{errors}"
    assert "Traceback" not in errors
    return printed + errors


def contents(folder: Path) -> dict[str, bytes]:
    """What a job leaves for training: everything but its reports and job folder."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {name: (folder / name).read_bytes() for name in names if name != "report.json" and name[:4] != "job/"}
