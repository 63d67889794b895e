"""Copies the package's own sources into an export, so that the models' mathematics is written once.

It copies the files in hugging_face/ and every module of the package that they import to one flat folder. Only import
lines change: `from gmlp_scale.models.gmlp import` becomes `from .gmlp import`, and pydantic becomes plain_config.
Transformers refuses a file that imports a library which is not installed, inside a function too.
"""

import importlib.util
import re
from pathlib import Path

CONFIGURATION = "gmlp_scale.export.hugging_face.configuration_gmlp"
MODELING = "gmlp_scale.export.hugging_face.modeling_gmlp"
QUESTION_ANSWERING = "gmlp_scale.export.hugging_face.answering_pipeline"
IMAGES = "gmlp_scale.export.hugging_face.modeling_gmlp_images"
PLAIN_CONFIG = "gmlp_scale.export.hugging_face.plain_config"

_IMPORT = re.compile(r"^from (gmlp_scale[\w.]*) import", flags=re.MULTILINE)


def copy_sources(folder: Path, modeling: str = MODELING) -> None:
    """Writes the files of hugging_face/ for text or images, and every module that they import, into `folder`."""
    waiting, source_of = [CONFIGURATION, modeling, *([QUESTION_ANSWERING] if modeling == MODELING else [])], {}
    while waiting:
        module = waiting.pop()
        if module not in source_of:
            source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
            source_of[module] = source.replace("from pydantic import", f"from {PLAIN_CONFIG} import")
            waiting += _IMPORT.findall(source_of[module])
    names = {_flat_name(module) for module in source_of}
    assert len(names) == len(source_of), f"two modules of one name: {sorted(source_of)}"
    # From a local folder transformers 4 takes only the files that the modeling file imports directly.
    others = sorted(names - {_flat_name(modeling)})
    source_of[modeling] += "\n" + "".join(f"from .{name} import __name__ as _  # noqa\n" for name in others)
    for module, source in source_of.items():
        flat = _IMPORT.sub(lambda found: f"from .{_flat_name(found[1])} import", source)
        (folder / f"{_flat_name(module)}.py").write_text(flat, encoding="utf-8")


def _flat_name(module: str) -> str:
    return module.rpartition(".")[2]
