"""Who may import whom: what keeps the packages readable one at a time."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gmlp_scale", "data_prep", "launch")

# package or module -> the project's modules that it may import (a prefix allows everything below it)
ALLOWED = {
    "gmlp_scale.kernels": ("gmlp_scale.kernels",),
    "gmlp_scale.models": ("gmlp_scale.models", "gmlp_scale.data.batch"),
    "gmlp_scale.data": ("gmlp_scale.data",),
    "gmlp_scale.world": (),
    "gmlp_scale.engine": ("gmlp_scale.engine", "gmlp_scale.world", "gmlp_scale.engine.optimizer"),
    "gmlp_scale.train": ("gmlp_scale.train", "gmlp_scale.engine", "gmlp_scale.data", "gmlp_scale.world"),
    "data_prep": ("data_prep", "gmlp_scale.data"),
}
EXCEPTIONS = {
    "gmlp_scale.models.gmlp": ("gmlp_scale.kernels.spatial_gating_unit",),  # the operator that one function calls
    "data_prep.inspect_batch": ("gmlp_scale.config",),  # shows the rows of a recipe, so it reads one
    "data_prep.benchmark_tokenizing": ("gmlp_scale.export.tokenizer",),  # times the exported tokenizer too
}

# modules that alone may import these
CONFINED = {
    "deepspeed": ("gmlp_scale.engine.zero",),
    "torch.distributed": ("gmlp_scale.world", "gmlp_scale.engine"),
    "sentencepiece": ("gmlp_scale.data.tokenizer", "data_prep"),
    "tensorboard": ("gmlp_scale.train.metrics", "gmlp_scale.analysis.tensorboard"),
    "torch.utils.tensorboard": ("gmlp_scale.train.metrics", "gmlp_scale.analysis.tensorboard"),
    "triton": ("gmlp_scale.kernels",),
    "pickle": (),
    "dill": (),
}
HEAVY = ("deepspeed", "transformers", "datasets", "matplotlib", "datatrove", "webdataset", "torch.utils.tensorboard")
FOR_TRANSFORMERS = "gmlp_scale.export.hugging_face"  # copied into exports; nothing of the package imports it


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names.append(ast.literal_eval(node.args[0]))
    return names


def is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports(path):
    name, tree = module_name(path), ast.parse(path.read_text())
    found = imports(tree)
    rule = next((allowed for package, allowed in ALLOWED.items() if is_below(name, package)), None)
    for imported in found:
        if is_below(imported, "gmlp_scale") or is_below(imported, "data_prep"):
            allowed = None if rule is None else rule + EXCEPTIONS.get(name, ())
            assert allowed is None or any(is_below(imported, a) for a in allowed), f"{name} may not import {imported}"
        assert not any(is_below(imported, x) for x in ("launch", "tests", "configs")) or name.startswith("launch")
        for library, users in CONFINED.items():
            if is_below(imported, library):
                assert any(is_below(name, user) for user in users), f"{library} may not be imported by {name}"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_environment_is_read_in_one_place(path):
    name = module_name(path)
    uses = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert not uses or name == "gmlp_scale.world" or not name.startswith("gmlp_scale"), f"{name} reads os.environ"


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in source_files()
        if is_below(name := module_name(p), "gmlp_scale") and not is_below(name, FOR_TRANSFORMERS)
    ],
    ids=module_name,
)
def test_heavy_libraries_are_imported_where_they_are_used(path):
    """Start-up and --dry-run must not pay for a library that this run does not use."""
    tree = ast.parse(path.read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for imported in (name for node in top_level for name in imports(node)):
        assert not any(is_below(imported, heavy) for heavy in HEAVY), (
            f"import {imported} inside the function that needs it"
        )
