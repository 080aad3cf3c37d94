"""What is installed, what is missing, and what to type: `mtp doctor`.

Owns checks that touch neither the network nor any result. It refuses to guess: each problem comes with what was seen
and a command. Its surprising decision: nothing heavy is imported; versions are read from package metadata.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from components.core import paths
from components.core.errors import UserError
from components.core.host import allowed_cores, memory_bytes
from components.core.params import load_params
from pipelines.repro import check_disk
from pipelines.stages.common import load_stages

PYTHON = (3, 11)
MEMORY_BYTES = 6 * 10**9  # distillation and training peak at about 4 GB
NAME = re.compile(r"^[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's; ``remedy`` is empty when all is well."""

    name: str
    seen: str
    remedy: str = ""

    @property
    def well(self) -> bool:
        """Whether there is nothing to do."""
        return not self.remedy


def examine(project: Path = Path()) -> list[Finding]:
    """Run every check in the project's folder."""
    return [
        check_python(),
        check_packages(project),
        check_git(project),
        check_dvc(project),
        _told("params.yaml", lambda: f"valid, {len(load_params(project / 'params.yaml').tasks)} tasks"),
        _told("dvc.yaml", lambda: f"{len(load_stages(project / 'dvc.yaml'))} stages"),
        _told("disk", lambda: _free(project)),
        check_memory(),
        Finding("cores", f"{allowed_cores()} allowed of {os.cpu_count()}"),
        check_results(project),
    ]


def _told(name: str, check: Callable[[], str]) -> Finding:
    """A check that raises a UserError for a problem."""
    try:
        return Finding(name, check())
    except UserError as error:
        return Finding(name, f"{error.what}: {error.seen}", error.do)


def _free(project: Path) -> str:
    check_disk(folder=project)
    return f"{shutil.disk_usage(project).free / 2**30:.0f} GiB free"


def check_python() -> Finding:
    """The interpreter's version."""
    seen = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    wanted = ".".join(map(str, PYTHON))
    right = sys.version_info[:2] == PYTHON
    return Finding("python", seen, "" if right else f"rm -rf .venv, then make install PYTHON=python{wanted}")


def check_packages(project: Path) -> Finding:
    """Direct dependencies against their pins."""
    try:
        pins = read_pins(project / "constraints.txt")
        wanted = direct_dependencies(project / "pyproject.toml")
    except (OSError, KeyError, ValueError) as error:
        return Finding("packages", str(error), "git checkout constraints.txt pyproject.toml")
    problems = list(_package_problems(wanted, pins))
    if not problems:
        return Finding("packages", f"{len(wanted)} direct dependencies as pinned")
    more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    return Finding("packages", "; ".join(problems[:4]) + more, "touch pyproject.toml, then make install")


def _package_problems(wanted: list[str], pins: Mapping[str, str]) -> Iterator[str]:
    for name in wanted:
        try:
            seen = version(name).partition("+")[0]  # "+cpu" is the same release
        except PackageNotFoundError:
            yield f"{name} is missing"
            continue
        if pins.get(name, seen) != seen:
            yield f"{name} {seen}, pinned {pins[name]}"


def read_pins(path: Path) -> dict[str, str]:
    """Name (lower case, dashes) -> version."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.partition("==")[::2] for line in lines if "==" in line)
    return {_normal(name): pinned.strip() for name, pinned in pairs}


def direct_dependencies(path: Path) -> list[str]:
    """Names in pyproject.toml that every user needs."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    entries: list[str] = document["project"]["dependencies"]
    return [_normal(match.group()) for entry in entries if (match := NAME.match(entry))]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def check_git(project: Path) -> Finding:
    """git, and a repository: releases are tagged with the commit."""
    if shutil.which("git") is None:
        return Finding("git", "not installed", "install git (Debian: apt-get install git)")
    done = subprocess.run(
        ["git", "rev-parse", "--is-inside-work-tree"], cwd=project, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return Finding("git", "this folder is no repository", "clone the project, or run `git init`")
    return Finding("git", "a repository")


def check_dvc(project: Path) -> Finding:
    """DVC's own folder, which the clone brings."""
    if not (project / ".dvc" / "config").is_file():
        return Finding("dvc", f"no .dvc/config in {project.resolve()}", "git checkout .dvc, or `dvc init`")
    return Finding("dvc", "a DVC repository")


def check_memory() -> Finding:
    """Physical memory."""
    found = memory_bytes()
    seen = f"{found / 1e9:.0f} GB" if found else "unknown"
    small = 0 < found < MEMORY_BYTES
    remedy = "lower distil.slots and train.batch_sequences in params.yaml, or use a larger machine"
    return Finding("memory", seen, remedy if small else "")


def check_results(project: Path) -> Finding:
    """How far the results are; having none yet is no problem."""
    if (project / paths.GATE_REPORT).is_file():
        return Finding("results", f"complete, see `mtp report` ({paths.REPORTS}/)")
    return Finding("results", "none or not all yet: `mtp repro` makes them")


def render(findings: list[Finding]) -> str:
    """A line per check; what is wrong has a second line with what to type."""
    lines = []
    for finding in findings:
        lines.append(f"{'ok  ' if finding.well else 'FAIL'}  {finding.name:<11} {finding.seen}")
        if not finding.well:
            lines.append(f"      {'next:':<11} {finding.remedy}")
    return "\n".join(lines)
