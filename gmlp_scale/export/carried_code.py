"""Copies the package's own sources into an export, so that the models' mathematics is written once.

It copies the files in hugging_face/ and every module of the package that they import to one flat folder. Only import
lines change: `from gmlp_scale.models.gmlp import` becomes `from .gmlp import`. In pydantic's place stands plain_config:
transformers refuses a file that imports a library which is not installed, inside a function too.
"""

import importlib.util
import re
from pathlib import Path

_FOLDER = "gmlp_scale.export.hugging_face"
_TEXT, _IMAGES = "modeling_gmlp", "modeling_gmlp_images"
_ROOTS = {_TEXT: ("configuration_gmlp", "answering_pipeline"), _IMAGES: ("configuration_gmlp",)}
"""What stands beside each of the files with the models."""
_IMPORT = re.compile(r"^from (gmlp_scale[\w.]*|pydantic) import", flags=re.MULTILINE)


def copy_sources(folder: Path, *, of_images: bool = False) -> None:
    """Writes the code for text or images, and every module that it imports, into `folder`."""
    modeling = _IMAGES if of_images else _TEXT
    waiting, source_of = [f"{_FOLDER}.{name}" for name in (modeling, *_ROOTS[modeling])], {}
    while waiting:
        module = waiting.pop()
        if module not in source_of:
            origin = importlib.util.find_spec(_own(module)).origin
            source_of[module] = Path(origin).read_text(encoding="utf-8")
            waiting += _IMPORT.findall(source_of[module])
    names = {_flat_name(module) for module in source_of}
    assert len(names) == len(source_of), f"two modules of one name: {sorted(source_of)}"
    # From a local folder transformers 4 takes only the files that the modeling file imports directly.
    others = sorted(names - {modeling})
    source_of[f"{_FOLDER}.{modeling}"] += "\n" + "".join(
        f"from .{name} import __name__ as _  # noqa\n" for name in others
    )
    for module, source in source_of.items():
        flat = _IMPORT.sub(lambda found: f"from .{_flat_name(found[1])} import", source)
        (folder / f"{_flat_name(module)}.py").write_text(flat, encoding="utf-8")


def _own(module: str) -> str:
    return f"{_FOLDER}.plain_config" if module == "pydantic" else module


def _flat_name(module: str) -> str:
    return _own(module).rpartition(".")[2]
