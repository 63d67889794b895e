"""The code of an export: the package's own sources, so that its mathematics is written once.

Starting from modeling_gmlp, every module of the package that is imported is copied to one flat folder, whole but for
its import lines: `from gmlp_scale.models.gmlp import` becomes `from .gmlp import`, and pydantic becomes plain_config.
"""

import importlib.util
import re
from pathlib import Path

ENTRY_MODULES = ("gmlp_scale.export.hugging_face.configuration_gmlp", "gmlp_scale.export.hugging_face.modeling_gmlp")
PLAIN_CONFIG = "gmlp_scale.export.hugging_face.plain_config"

_IMPORT = re.compile(r"^from (gmlp_scale[\w.]*) import", flags=re.MULTILINE)


def copy_sources(folder: Path) -> None:
    """Writes modeling_gmlp.py, configuration_gmlp.py and every module that they need into `folder`."""
    waiting, copied = list(ENTRY_MODULES), {}
    while waiting:
        module = waiting.pop()
        if module in copied:
            continue
        copied[module] = _file_name(module)
        source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
        source = source.replace("from pydantic import", f"from {PLAIN_CONFIG} import")
        waiting += _IMPORT.findall(source)
        flat = _IMPORT.sub(lambda found: f"from .{_file_name(found[1])} import", source)
        (folder / f"{_file_name(module)}.py").write_text(flat, encoding="utf-8")
    assert len(set(copied.values())) == len(copied), f"two modules of one name: {copied}"


def _file_name(module: str) -> str:
    return module.rpartition(".")[2]
