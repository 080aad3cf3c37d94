"""What the repository's own rules are checked against: tracked files, the import graph, dvc.yaml.

The import graph is read from the syntax tree, imports inside functions included: a lazily imported module is as much a
part of a stage as one imported at the top. `if TYPE_CHECKING:` blocks never run and do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("components", "pipelines")


@dataclass(frozen=True)
class Import:
    """One import statement: the dotted name, and whether it stands at the top of its module."""

    name: str
    at_top: bool


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git tracks or would add; relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return tuple(sorted({Path(name) for name in listed if name and (ROOT / name).is_file()}))


@cache
def project_modules() -> dict[str, Path]:
    """Dotted name -> path relative to the root, for every module of both packages."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = relative
    return modules


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Parsed module; ``path`` is relative to the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def _statements(node: ast.AST, at_top: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        yield child, at_top
        in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _statements(child, at_top and not in_function)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import that can run in a module; ``from a import b`` gives ``a`` and ``a.b``."""
    found = []
    for node, at_top in _statements(syntax_tree(path), True):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the direction of an import"
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [Import(name, at_top) for name in names]
    return tuple(found)


def third_party(path: Path) -> set[str]:
    """Top-level names that a module imports from outside the project and the standard library."""
    tops = {found.name.partition(".")[0] for found in imports_of(path)}
    return tops - set(sys.stdlib_module_names) - set(PACKAGES)


@cache
def closure(module: str) -> frozenset[str]:
    """Project modules that ``module`` can load, itself and the packages above each included."""
    modules, waiting, seen = project_modules(), [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in modules:
            continue
        seen.add(name)
        waiting += [found.name for found in imports_of(modules[name])]
        waiting.append(name.rpartition(".")[0])
    return frozenset(seen)


def holds_code(path: Path) -> bool:
    """Whether a module does anything beyond its docstring."""
    return any(not isinstance(node, ast.Expr) for node in syntax_tree(path).body)


@dataclass(frozen=True)
class Stage:
    """One entry of dvc.yaml."""

    name: str
    cmd: str
    deps: tuple[Path, ...]
    outs: tuple[Path, ...]
    params: tuple[str, ...]


def _names(entries: Any) -> list[str]:
    return [name for entry in entries or () for name in ([entry] if isinstance(entry, str) else entry)]


@cache
def stages() -> tuple[Stage, ...]:
    """The stages of dvc.yaml, in its order."""
    path = ROOT / "dvc.yaml"
    assert path.is_file(), "dvc.yaml is missing"
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["stages"]
    return tuple(
        Stage(
            name=name,
            cmd=str(entry["cmd"]),
            deps=tuple(map(Path, _names(entry.get("deps")))),
            outs=tuple(Path(out) for kind in ("outs", "metrics", "plots") for out in _names(entry.get(kind))),
            params=tuple(_names(entry.get("params"))),
        )
        for name, entry in entries.items()
    )
