"""The doctor sees what is wrong, and says what to type."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines import doctor
from pipelines.doctor import Finding, examine, render

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the doctor looks at, in good health."""
    for name in ("params.yaml", "dvc.yaml", "pyproject.toml", "constraints.txt", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine() if not finding.well}


def test_a_healthy_project_has_no_problem(project: Path) -> None:
    assert problems() == {}


def test_a_package_that_is_not_as_pinned_is_named(project: Path) -> None:
    pins = (project / "constraints.txt").read_text()
    seen = version("typer")
    (project / "constraints.txt").write_text(pins.replace(f"typer=={seen}", "typer==0.0.1"))
    assert problems()["packages"].seen == f"typer {seen}, pinned 0.0.1"


def test_a_missing_package_is_named(project: Path) -> None:
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('    "typer",', '    "no-such-package-here",'))
    assert problems()["packages"].seen == "no-such-package-here is missing"


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("params.yaml", "tain: {}\n", "params.yaml"),
        ("dvc.yaml", ": [", "dvc.yaml"),
        ("pyproject.toml", "= broken", "packages"),
        ("constraints.txt", None, "packages"),
        (".dvc/config", None, "dvc"),
        ("params.yaml", None, "params.yaml"),
    ],
)
def test_a_broken_or_missing_file_is_one_problem(project: Path, name: str, text: str | None, finding: str) -> None:
    (project / name).unlink() if text is None else (project / name).write_text(text)
    found = problems()
    assert list(found) == [finding]
    assert found[finding].remedy


def test_a_folder_without_repository_and_a_machine_without_git(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert doctor.check_git(tmp_path_factory.mktemp("plain")).seen == "this folder is no repository"
    monkeypatch.setenv("PATH", "")
    assert problems()["git"].seen == "not installed"


def test_a_small_machine_and_a_full_disk(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 2 * 10**9)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert set(problems()) == {"memory", "disk"}


def test_another_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PYTHON", (3, 99))
    assert "python3.99" in doctor.check_python().remedy


def test_every_problem_has_its_remedy_below_it() -> None:
    text = render([Finding("a", "fine"), Finding("b", "gone", "type this")])
    assert [line.split() for line in text.splitlines()] == [
        ["ok", "a", "fine"],
        ["FAIL", "b", "gone"],
        ["next:", "type", "this"],
    ]


def test_the_doctor_opens_no_connection_and_loads_nothing_heavy(project: Path) -> None:
    script = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection')\n"
        "socket.socket.connect = refuse\n"
        "from pipelines.doctor import examine\n"
        "examine()\n"
        "print(sorted({'torch', 'mlflow', 'prefect', 'dvc', 'onnxruntime', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr
