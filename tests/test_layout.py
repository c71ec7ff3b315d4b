"""The package: who may import whom, what is public, and what ``import bilevel`` needs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bilevel

ROOT = Path(bilevel.__file__).parent
# A part may import from the parts before its own. One folder is one part.
ORDER = [
    {"batches", "duals", "interrupts", "plain", "responding", "tape"},
    {
        "arguments",
        "autodiff",
        "checkpoint",
        "events",
        "functional",
        "hyper",
        "layouts",
        "nn",
        "optimizers",
        "precision",
        "rng",
    },
    {"dropouts", "parallel", "regularizers"},
    {"augment"},
    {"compilation", "history", "problem"},
    {"linear_solvers", "plotting", "schedule", "structure"},
    {"checks", "report"},
    {"response"},
    {"solver"},
    {"loop"},
    {"diagnostics", "loggers", "testing", "tuning"},
    {"__init__"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder of a file, or the file itself."""
    return path.parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """The modules that are imported when the code runs, at any depth."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            package = node.module == "bilevel"
            found |= {f"bilevel.{alias.name}" for alias in node.names} if package else {str(node.module)}
        else:
            found |= imports(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_one_way(path):
    """From the leaves to ``__init__``; within a folder, files may import each other."""
    own = part_of(path)
    for module in imports(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if module.split(".")[0] == "bilevel":
            other = [*module.split("."), "__init__"][1]
            assert other == own or LEVEL[other] < LEVEL[own], f"{path} imports {module}"


def test_every_part_has_its_place():
    """A new file must say where it stands in the order."""
    assert {part_of(path) for path in FILES} <= LEVEL.keys()


def test_public_names_exist():
    """``__all__`` has no stale name and no duplicate, and every public object has a docstring."""
    assert len(set(bilevel.__all__)) == len(bilevel.__all__)
    for name in bilevel.__all__:
        value = getattr(bilevel, name)
        assert name == "METHODS" or value.__doc__, f"{name} has no docstring"


def test_everything_imported_into_the_package_is_public():
    """A name that ``__init__`` imports without listing it would be public by accident."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    names = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names == set(bilevel.__all__)


APPLICATIONS = Path(__file__).parents[1] / "applications"


@pytest.mark.parametrize("path", sorted(APPLICATIONS.rglob("*.py")), ids=lambda path: path.name)
def test_applications_use_public_names_only(path):
    """``bilevel.name``, or an import from one of its public modules; nothing with an underscore."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "bilevel":
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = next((alias.name.split(".") for alias in node.names if alias.name.startswith("bilevel.")), [])
        elif isinstance(node, ast.Attribute):
            names = re.findall(r"^\w+(?:\.\w+)+$", ast.unparse(node))
            names = names[0].split(".") if names else []
        else:
            continue
        if names[:1] == ["bilevel"] and names != ["bilevel", "__version__"]:
            assert names[1] in bilevel.__all__, f"{path} uses {'.'.join(names)}"
            assert not any(name.startswith("_") for name in names), f"{path} uses {'.'.join(names)}"


def test_importing_needs_torch_numpy_and_tqdm_only():
    """No optional dependency is loaded; of third parties, only what those three load themselves."""
    script = """
import importlib, json, sys
for name in ("torch", "numpy", "tqdm.auto", "torch.distributions", "torch.func"):
    importlib.import_module(name)
before = set(sys.modules)
import bilevel
new = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"torch", "numpy", "tqdm"}
optional = {"matplotlib", "pandas", "sklearn", "scipy", "sphinx", "pytest", "hypothesis"} & set(sys.modules)
print(json.dumps({"new": sorted(new), "optional": sorted(optional)}))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {"new": ["bilevel"], "optional": []}
