"""Who may import whom, as a test: nobody looks up, and the pure rooms stay pure."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TENANTS = ("controller", "agent", "trainer", "migrations")

# The most specific room wins. A room may import what starts with one of its names.
MAY_IMPORT = {
    "trainer.contract": ("trainer.contract",),
    "trainer": ("trainer",),
    "agent.wire": ("trainer.contract",),
    "agent": ("agent", "trainer.contract"),
    "controller.planner": ("controller.planner", "trainer.contract"),
    "controller.core": ("controller.core", "controller.planner", "trainer.contract"),
    "controller.cloud": ("controller.cloud", "agent.wire", "trainer.contract"),
    "controller.store": ("controller.store", "controller.core", "agent.wire", "trainer.contract"),
    "controller.client": ("controller.client", "controller.api.schemas", "controller.cloud",
                          "controller.core", "controller.specfile", "controller.words",
                          "trainer.contract"),
    "controller": ("controller", "agent.wire", "trainer.contract"),
    "migrations": ("controller.store.tables", "controller.settings"),
}  # fmt: skip
PURE = ("controller.core", "controller.planner", "controller.chaos.deeds",
        "controller.chaos.verdict", "trainer.contract.schedule",
        "trainer.contract.topology", "trainer.contract.lineage", "trainer.contract.samples",
        "agent.decide")  # fmt: skip
IMPURE_MODULES = ("asyncio", "logging", "os", "pathlib", "random", "secrets", "socket",
                  "sqlalchemy", "structlog", "subprocess", "threading", "time", "uuid", "httpx2",
                  "fastapi", "numpy", "torch")  # fmt: skip
CLOCK_CALLS = ("datetime.now", "datetime.utcnow", "date.today", "time.time", "time.monotonic")
# A heavy or optional package may be imported where it is used, nothing else.
LAZY_ALLOWED = ("torch", "numpy", "safetensors", "azure", "paramiko", "transformers", "psycopg",
                "fsspec", "tensorboardX")  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    for tenant in TENANTS:
        for path in sorted((ROOT / tenant).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            yield ".".join(parts), path


MODULES = dict(modules())


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def parts(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(module)))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the room"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imported_module(name: str) -> str:
    """``name`` is a module, or something in one."""
    return name if name in MODULES else name.rpartition(".")[0]


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def room_of(module: str) -> str:
    return max((room for room in MAY_IMPORT if within(module, room)), key=len)


# One test a rule, not one a module: a thousand small tests take longer than all that they look at.


def test_nobody_looks_up() -> None:
    assert not [
        f"{module} imports {name}"
        for module in MODULES
        for node in parts(module)
        for name in imported(node)
        if name.split(".")[0] in TENANTS
        if not any(within(name, room) for room in MAY_IMPORT[room_of(module)])
    ]


def test_rooms_form_no_circle() -> None:
    """A room is what lies right below a tenant: a folder, or a file of its own."""
    rooms = {module: ".".join(module.split(".")[:2]) for module in MODULES}
    below: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, room in rooms.items():
        below[room] |= {
            rooms[imported_module(name)]
            for node in parts(module)
            for name in imported(node)
            if name.split(".")[0] in TENANTS
        } - {room}
    assert tuple(TopologicalSorter(below).static_order())  # raises CycleError with the circle


def test_pure_rooms_stay_pure() -> None:
    pure = [module for module in MODULES if any(within(module, room) for room in PURE)]
    assert len(pure) > len(PURE)
    for module in pure:
        for node in parts(module):
            for name in imported(node):
                assert name.split(".")[0] not in IMPURE_MODULES, f"{module} imports {name}"
            assert not isinstance(node, ast.AsyncFunctionDef), f"{module} is async"
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CLOCK_CALLS, f"{module} asks for the time"


def test_imports_stand_at_the_top() -> None:
    assert not [
        f"{module} hides import {name}"
        for module in MODULES
        for function in parts(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in imported(node)
        if name.split(".")[0] not in LAZY_ALLOWED
    ]


def test_a_package_is_a_docstring_and_nothing_more() -> None:
    for module in (m for m, path in MODULES.items() if path.name == "__init__.py"):
        assert len(tree(module).body) <= 1, f"{module} re-exports"
        assert ast.get_docstring(tree(module)), f"{module} does not say why"


@pytest.mark.parametrize("module", ["controller.app", "controller.cli.main", "agent.daemon"])
def test_the_controller_and_the_agent_come_up_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["controller", "agent", "trainer"])
def test_the_import_names_are_ours_alone(name: str) -> None:
    assert set(packages_distributions()[name]) == {"varuna-spot"}


def test_the_top_level_is_what_the_user_named() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    named = {"controller", "agent", "trainer", "migrations", "deploy", "tests", "pyproject.toml",
             "README.md", "Makefile", "constraints.txt"}  # fmt: skip
    found = {path.split("/")[0] for path in tracked}
    assert {name for name in found if not name.startswith(".")} <= named
