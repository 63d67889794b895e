"""Who may import whom: imports run one way, so the packages can be read one at a time."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gmlp_scale", "data_prep", "launch", "benchmarks")

# Each imports from itself and from those above it..
ORDER = [
    ("errors", "piecewise", "fields"),
    ("options",),
    ("storage",),
    ("distributed",),
    ("data", "kernels"),
    ("models", "prepare"),
    ("engine",),
    ("checkpoint",),
    ("recipe",),
    ("plan", "checkpoint.trained"),
    ("checkpoint.saved_run",),
    ("tasks",),
    ("train",),
    ("export",),
    ("finetune",),
    ("analysis",),
    ("doctor", "science"),
]
# Narrower than the order: package or module -> all that it may import of the project.
ALLOWED = {
    "gmlp_scale.storage": ("gmlp_scale.storage",),
    "gmlp_scale.piecewise": (),
    "gmlp_scale.fields": (),
    "gmlp_scale.options": (),
    "gmlp_scale.kernels": ("gmlp_scale.kernels",),
    "gmlp_scale.data": (
        "gmlp_scale.data",
        "gmlp_scale.storage",
        "gmlp_scale.piecewise",
        "gmlp_scale.distributed.process",
    ),
    "gmlp_scale.models": ("gmlp_scale.models", "gmlp_scale.data.batch", "gmlp_scale.kernels.fused_gating"),
    "gmlp_scale.engine": ("gmlp_scale.engine", "gmlp_scale.distributed.world", "gmlp_scale.piecewise"),
    "gmlp_scale.prepare": (
        "gmlp_scale.prepare",
        "gmlp_scale.data",
        "gmlp_scale.storage",
        "gmlp_scale.distributed.logs",
    ),
    "data_prep": (
        "gmlp_scale.prepare",
        "gmlp_scale.data",
        "gmlp_scale.storage",
        "gmlp_scale.distributed.logs",
        "gmlp_scale.options",
    ),
}
EXCEPTIONS = {
    # Shows the rows of a recipe.
    "data_prep.inspect_batch": ("gmlp_scale.recipe.reader",)
}

# modules that alone may import these
CONFINED = {
    "benchmarks": ("benchmarks",),
    "gmlp_scale.prepare": ("gmlp_scale.prepare", "data_prep"),
    "datatrove": ("gmlp_scale.prepare",),
    "deepspeed": ("gmlp_scale.engine.zero_sharding",),
    "torch.distributed": (
        "gmlp_scale.distributed",
        "gmlp_scale.engine",
        "gmlp_scale.train.rank_server",
        "benchmarks",
        "launch.elastic",
    ),
    "sentencepiece": ("gmlp_scale.data.tokenizer", "data_prep"),
    "tokenizers": (
        "gmlp_scale.checkpoint.modernbert",
        "gmlp_scale.data.json_tokenizer",
        "gmlp_scale.export.fast_tokenizer",
    ),
    "tensorboard": ("gmlp_scale.train.sinks", "gmlp_scale.analysis.run_records", "gmlp_scale.train.rank_server"),
    "torch.utils.tensorboard": ("gmlp_scale.analysis.run_records", "gmlp_scale.train.sinks"),
    "wandb": ("gmlp_scale.train.sinks",),
    "trackio": ("gmlp_scale.train.sinks",),
    "triton": ("gmlp_scale.kernels", "benchmarks.compiled_kernels"),
    "webdataset": ("gmlp_scale.data.image_shards", "benchmarks"),
    "kornia": ("gmlp_scale.data.augmentation",),
    "sentence_transformers": ("gmlp_scale.finetune.search",),
    "bm25s": ("gmlp_scale.finetune.search",),
    "filelock": ("gmlp_scale.storage.run_folder", "gmlp_scale.data.manifest"),
    "pickle": (),
    "dill": (),
}
HEAVY = (
    "deepspeed", "transformers", "datasets", "matplotlib", "datatrove", "webdataset", "wandb", "trackio", "kornia",
    "torch.utils.tensorboard", "sentence_transformers", "bm25s",
)  # fmt: skip
FOR_TRANSFORMERS = "gmlp_scale.export.hugging_face"  # copied into exports; nothing of the package imports it


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    name, tree = module_name(path), parsed(path)
    found = imports(tree)
    rule = next((allowed for package, allowed in ALLOWED.items() if is_below(name, package)), None)
    for imported in found:
        if is_below(imported, "gmlp_scale") or is_below(imported, "data_prep"):
            allowed = (
                None if rule is None else (*rule, "gmlp_scale.errors", "gmlp_scale.fields", *EXCEPTIONS.get(name, ()))
            )
            assert allowed is None or any(is_below(imported, a) for a in allowed), f"{name} may not import {imported}"
        assert not any(is_below(imported, x) for x in ("launch", "tests", "configs")) or name.startswith("launch")
        for library, users in CONFINED.items():
            if is_below(imported, library):
                assert any(is_below(name, user) for user in users), f"{library} may not be imported by {name}"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_run_one_way(path):
    name = module_name(path)
    levels = {f"gmlp_scale.{package}": level for level, packages in enumerate(ORDER) for package in packages}
    innermost_first = sorted(levels.items(), key=lambda entry: -entry[0].count("."))

    def level_of(module: str) -> tuple[str, int] | None:
        return next(((package, level) for package, level in innermost_first if is_below(module, package)), None)

    if not is_below(name, "gmlp_scale") or name == "gmlp_scale":
        return
    package, level = level_of(name)  # fails for a package that has no place in the order
    for imported in filter(None, map(level_of, imports(parsed(path)))):
        assert imported[0] == package or imported[1] < level, f"{name} may not import {imported[0]}"


def test_no_two_modules_have_one_name():
    names = [name for name in map(module_name, source_files()) if name.startswith(("gmlp_scale", "data_prep"))]
    counts = Counter(name.rpartition(".")[2] for name in names)
    assert {name for name, count in counts.items() if count > 1} == {"config"}


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_environment_is_read_in_few_places(path):
    name = module_name(path)
    uses = [
        node
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    readers = [f"gmlp_scale.distributed.{module}" for module in ("rendezvous", "world", "process", "logs")]
    may = name in readers or not name.startswith("gmlp_scale")
    assert not uses or may, f"{name} reads os.environ"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_asserts_change_nothing(path):
    """`python -O` leaves them out. It did so with the shapes of all tensors in a checkpoint."""
    asserts = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
    parts = [part for node in asserts for part in ast.walk(node.test)]
    called = {part.func.attr for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)}
    assert called <= {"keys", "values", "items", "get", "min", "max", "is_contiguous", "is_file", "any", "all", "equal"}
    assert not any(isinstance(part, ast.NamedExpr) for part in parts)


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in source_files()
        if is_below(name := module_name(p), "gmlp_scale")
        and not any(is_below(name, other) for other in (FOR_TRANSFORMERS, "gmlp_scale.prepare"))
    ],
    ids=module_name,
)
def test_heavy_libraries_are_imported_where_they_are_used(path):
    """Start-up and --dry-run must not pay for a library that this run does not use."""
    tree = parsed(path)
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for imported in (name for node in top_level for name in imports(node)):
        assert not any(is_below(imported, heavy) for heavy in HEAVY), (
            f"import {imported} inside the function that needs it"
        )
