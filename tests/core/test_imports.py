"""What importing loads, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tenfold

ROOT = Path(tenfold.__file__).parent
HEAVY = ("numpy", "torch", "transformers")
LIGHT = ["tenfold", "tenfold.core", "tenfold.engine.engine", "tenfold.server", "tenfold.sim", "tenfold.planner"]
LIGHT += ["tenfold.planner.report", "tenfold.cli.plan", "tenfold.loadtest.load", "tenfold.loadtest.report"]
AMBIENT = {"asyncio", "datetime", "logging", "os", "random", "secrets", "socket", "threading", "time"}
"""Standard modules through which the outside would enter the core other than by a call."""


def exists(module: str) -> bool:
    place = ROOT.parent.joinpath(*module.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


@pytest.mark.parametrize("module", [module for module in LIGHT if exists(module)])
def test_importing_loads_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path.name} has a relative import"
            names.add(node.module)
    return names


CORE = sorted((ROOT / "core").rglob("*.py"))


def test_the_core_is_found() -> None:
    assert {"scheduler.py", "arena.py", "spec.py"} <= {path.name for path in CORE}


@pytest.mark.parametrize("path", [*CORE, ROOT / "errors.py"], ids=lambda path: path.name)
def test_the_core_imports_the_standard_library_and_itself(path: Path) -> None:
    for name in imported(path):
        own = name == "tenfold.errors" or name == "tenfold.core" or name.startswith("tenfold.core.")
        assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_has_no_clock_thread_environment_or_log(path: Path) -> None:
    assert not AMBIENT & {name.split(".")[0] for name in imported(path)}


LOADTEST = sorted((ROOT / "loadtest").rglob("*.py"))


@pytest.mark.parametrize("path", LOADTEST, ids=lambda path: path.name)
def test_the_load_generator_knows_no_engine(path: Path) -> None:
    own = {name for name in imported(path) if name == "tenfold" or name.startswith("tenfold.")}
    assert all(name in ("tenfold", "tenfold.errors") or name.startswith("tenfold.loadtest.") for name in own), own


PLANNER = sorted((ROOT / "planner").rglob("*.py"))
PLANNER_MAY_USE = ("core", "errors", "units", "planner", "models.files", "models.gguf_file", "models.hub")


@pytest.mark.parametrize("path", PLANNER, ids=lambda path: path.name)
def test_the_planner_imports_the_core_and_what_reads_headers(path: Path) -> None:
    for name in imported(path):
        if name.startswith("tenfold."):
            assert name.removeprefix("tenfold.").startswith(PLANNER_MAY_USE), f"{path.name} imports {name}"
