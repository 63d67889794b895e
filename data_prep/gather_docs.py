"""Gathers a corpus without a download: the English prose in the documentation of the installed Python packages.

python data_prep/gather_docs.py --output docs.jsonl

Takes docstrings and .md, .rst and .txt files in an order that mixes the packages, until there is enough text. Drops
code blocks, doctests, tables, lists of parameters and paragraphs seen before. Writes one JSON line per source file:
{"text", "source"}. The same packages give the same bytes.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from gmlp_scale.distributed.logs import command, progress_bar
from gmlp_scale.errors import InputError
from gmlp_scale.options import count
from gmlp_scale.storage.files import write_file

_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
_PASSED_OVER = {"tests", "test", "testing", "__pycache__", "licenses"}
_MIN_DOCUMENT_WORDS = 40
_FENCED_BLOCK = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_MARKUP = re.compile(
    r"<[^>\n]{1,200}>|!?\[([^\]\n]*)\]\([^)\n]*\)|:[a-z:]+:`~?([^`<]*?)(?: ?<[^`]*>)?`"
    r"|`+([^`\n]*)`+_*|\*{1,2}(\S[^*\n]*)\*{1,2}"
)
_NOT_PROSE_LINE = re.compile(
    r"\s*(>>>|\.\.\.|\$ |\||\+-|==|--|\.\. |#|:|(args|arguments|parameters|params|attributes|returns|yields|raises"
    r"|examples?|notes?|usage)\s*:?\s*$|(args|returns):|[\w.*`]+ ?\([^)]*\) ?:|[\w.*`]+ : )",
    re.IGNORECASE,
)
_LICENCE_NAME = re.compile(
    r"licen[cs]e|copying|notice|authors|record|entry_points|top_level|third.?party", re.IGNORECASE
)
_LICENCE_TEXT = re.compile(
    r"copyright|warrant(y|ies)|permission is hereby|licen[cs]ed? under|redistribut", re.IGNORECASE
)


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages, default = Path(sysconfig.get_paths()["purelib"]), "(default: %(default)s)"
    parser.add_argument("--output", required=True, metavar="FILE", help="of JSON lines")
    parser.add_argument("--folder", type=Path, default=packages, help=f"of packages {default}")
    parser.add_argument("--bytes", type=count, default=5_000_000, help=f"stop when there is so much text {default}")
    options = parser.parse_args()
    files = find_files(options.folder)
    if not files:
        raise InputError(f"--folder {options.folder} holds no Python or documentation files")
    documents = gather(options.folder, files, options.bytes)
    content = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode()
    write_file(options.output, content)
    print(f"{options.output}: {len(documents):,} documents, {len(content):,} bytes, of {len(files):,} files")
    return 0


def find_files(folder: Path) -> list[str]:
    """Documentation and Python files, relative to `folder`, without tests, licences and files of the packaging."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _PASSED_OVER]
        paths = [os.path.join(parent, name) for name in names if not _LICENCE_NAME.search(name)]
        readable = [path for path in paths if os.path.isfile(path) and os.access(path, os.R_OK)]
        found += [os.path.relpath(path, folder) for path in readable if path.endswith(_SUFFIXES)]
    return found


def gather(folder: Path, files: list[str], max_bytes: int) -> list[dict[str, str]]:
    """One document for each file that holds enough prose, sorted by source, of about `max_bytes` in all."""
    seen: set[bytes] = set()
    documents = []
    with progress_bar(desc="gathering", total=max_bytes, unit="B", unit_scale=True, mininterval=0.5) as bar:
        for source in sorted(files, key=_digest):
            text = "\n".join(new_paragraphs(folder / source, seen))
            if len(text.split()) >= _MIN_DOCUMENT_WORDS:
                documents.append({"text": text, "source": source})
                bar.update(len(text.encode()))
            if bar.n >= max_bytes:
                break
    return sorted(documents, key=lambda document: document["source"])


def new_paragraphs(path: Path, seen: set[bytes]) -> list[str]:
    """The file's paragraphs of prose that are not in `seen` yet; adds them to it."""
    content = path.read_text(encoding="utf-8", errors="ignore")
    texts = docstrings(content) if path.suffix.startswith(".py") else [_FENCED_BLOCK.sub("", content)]
    paragraphs = []
    for paragraph in (paragraph for text in texts for paragraph in prose_paragraphs(text)):
        digest = _digest(paragraph.lower())
        if digest not in seen:
            seen.add(digest)
            paragraphs.append(paragraph)
    return paragraphs


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def docstrings(source: str) -> list[str]:
    """The docstrings of a Python file in their order; none where the file does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return []
    return list(_docstrings_below(tree))


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    """The docstrings of modules, classes and functions. Other nodes, most of the tree, are not visited."""
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_below(child)


def prose_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs that read as English sentences, each on one line, without markup."""
    for block in re.split(r"\n\s*\n", text.expandtabs()):
        lines = block.strip("\n").splitlines()
        if not lines or any(map(_NOT_PROSE_LINE.match, lines)):
            continue
        paragraph = _without_markup(_without_markup(" ".join(block.split())))  # twice: markup may hold markup
        if is_prose(paragraph):
            yield paragraph


def _without_markup(text: str) -> str:
    return _MARKUP.sub(lambda match: next((group for group in match.groups() if group), ""), text)


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph has at least eight words, mostly of plain lower-case letters, and is not from a licence."""
    words = paragraph.split()
    if len(words) < 8 or not paragraph[0].isalpha() or paragraph[-1] not in ".:!?)":
        return False
    plain = sum(word.strip(".,;:!?()'\"").isalpha() for word in words)
    letters = sum(character.islower() or character == " " for character in paragraph)
    return plain >= 0.75 * len(words) and letters >= 0.85 * len(paragraph) and not _LICENCE_TEXT.search(paragraph)


if __name__ == "__main__":
    sys.exit(main())
