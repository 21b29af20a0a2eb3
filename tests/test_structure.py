"""Habits of the whole repository, kept by tests."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.config import Config
from headrace.observe.metrics import markdown

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))

# An area may import areas of its own level or below; the leaves at level 0 only each other.
LEVELS = {
    "headrace": 7, "cli": 7, "__main__": 7,
    "trainers": 6,
    "flow": 5,
    "cluster": 4, "roles": 4,
    "training": 3, "rollout": 3, "reshard": 3, "rewards": 3, "checkpoint": 3, "agents": 3,
    "models": 2, "data": 2, "algorithms": 2,
    "stages": 1, "kernels": 1,
    "observe": 0, "config": 0, "errors": 0,
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def area(module: str) -> str:
    """The part of the package a module belongs to; all of config*.py are one area, and so are cli*.py."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return next((stem for stem in ("config", "cli") if name.startswith(stem + "_")), name)


def statements(tree: ast.AST, *, inside_functions: bool) -> Iterator[ast.stmt]:
    """All statements that run, without the bodies of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.stmt):
            yield node
        if inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(node, inside_functions=inside_functions)


def imports(module: str, *, inside_functions: bool) -> set[str]:
    """The headrace modules that a module imports by name."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text()), inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in MODULES else base)
    return found & MODULES.keys() - {module}


def test_the_imports_are_found():
    """Guards the tests below against finding nothing."""
    assert "headrace.errors" in imports("headrace.observe.run_dir", inside_functions=False)
    assert sum(len(imports(module, inside_functions=False)) for module in MODULES) > 20


def test_no_import_cycles():
    graph = {module: imports(module, inside_functions=True) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_imports_point_one_way():
    """Imports inside functions count as well: they hide a wrong direction, they do not mend it."""
    unknown = sorted({area(module) for module in MODULES} - LEVELS.keys())
    assert not unknown, f"give {unknown} a level in tests/test_structure.py"
    wrong = [
        f"{module} ({LEVELS[area(module)]}) imports {other} ({LEVELS[area(other)]})"
        for module in MODULES
        for other in sorted(imports(module, inside_functions=True))
        if LEVELS[area(module)] < LEVELS[area(other)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_long():
    every = [
        path
        for area in ("headrace", "tests", "examples", "benchmarks")
        for path in (ROOT / area).rglob("*.py")
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in every}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_no_print_assert_or_bare_except():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_print = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            )
            is_bare = isinstance(node, ast.ExceptHandler) and node.type is None
            if is_print or is_bare or isinstance(node, ast.Assert):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, found


def count_keys(section: type[BaseModel]) -> int:
    kinds = [field.annotation for field in section.model_fields.values()]
    return sum(count_keys(k) if isinstance(k, type) and issubclass(k, BaseModel) else 1 for k in kinds)


def test_the_configuration_stays_small():
    assert 20 < count_keys(Config) < 120


@pytest.mark.parametrize(
    "code",
    [
        "import headrace",
        "from headrace.cli import main\nsys.argv = ['headrace', '--help']\ntry: main()\nexcept SystemExit: pass",
    ],
    ids=["import headrace", "headrace --help"],
)
def test_light_commands_load_no_heavy_library(code):
    heavy = ("torch", "transformers", "datasets", "tensorboard", "matplotlib", "pandas")
    script = f"import sys\n{code}\nsys.stderr.write(' '.join(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_docs_metrics_is_current():
    assert (ROOT / "docs/metrics.md").read_text() == markdown(), "run `make docs`"


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {name: {""} for name in map(package_name, project["dependencies"])}
    for extra, requirements in project["optional-dependencies"].items():
        for name in map(package_name, requirements):
            wanted.setdefault(name, set()).add(extra)
    page = (ROOT / "docs/dependencies.md").read_text()
    documented = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("`"):
            documented[cells[0].strip("`")] = (
                {e.strip(" `") for e in cells[1].split(",")} if len(cells) == 3 else {""}
            )
            assert len(cells[-1]) > 10, line
    assert documented == wanted


def package_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]
