"""The README tells the truth: its commands run, its picture is dvc.yaml, its files exist, its example is valid."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.core.config import RECIPE_BOUNDS, Task
from components.core.manifest import TaskPrompt
from components.core.params import load_params, parse_params
from components.data import recipes
from components.data.free_text import fill_from_row
from helpers_cli import three_lines
from helpers_readme import HOW, README, Way, blocks, commands_tested, readme_commands
from helpers_repository import ROOT, stages, tracked_files

LONGEST_README_LINES = 200
MAKE_RUNS = {
    "repro": [".venv/bin/mtp repro"],
    "test": [".venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder"],
    "check": [".venv/bin/ruff check .", ".venv/bin/ruff format --check .", ".venv/bin/mypy"],
    "ui": [".venv/bin/mtp ui"],
}


def mtp(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as the installed script does."""
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
    )


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make, free of the make that may run this suite."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**environment, "INSTALL_PROGRESS_S": "1"}
    )


def dry_run(target: str) -> list[str]:
    """What `make TARGET` would type."""
    done = make(ROOT, "-n", "-o", ".venv/.installed", target)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_command_is_tested_in_a_known_way() -> None:
    assert set(readme_commands()) == set(HOW)


def test_the_two_commands_come_first() -> None:
    assert readme_commands()[:2] == ["make repro", "make test"]


@pytest.mark.parametrize("target", MAKE_RUNS)
def test_make_types(target: str) -> None:
    assert dry_run(target) == MAKE_RUNS[target]


def test_every_make_command_of_the_readme_is_known() -> None:
    assert {arguments[1] for arguments in commands_tested(Way.MAKE)} <= set(MAKE_RUNS)


@pytest.mark.parametrize("arguments", commands_tested(Way.HERE), ids=" ".join)
def test_light_commands_run(arguments: list[str]) -> None:
    done = mtp(*arguments[1:])
    assert done.returncode in (0, 2), done.stderr  # 2: doctor found something missing, in three lines
    assert "Traceback" not in done.stderr + done.stdout
    assert (done.stdout + done.stderr).strip()


@pytest.mark.parametrize("arguments", commands_tested(Way.END_TO_END), ids=" ".join)
def test_heavy_commands_exist_with_their_options(arguments: list[str]) -> None:
    done = mtp(arguments[1], "--help")
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in arguments if option.startswith("--"))


def test_heavy_commands_are_run_end_to_end() -> None:
    test = ROOT / "tests/test_end_to_end.py"
    assert test.is_file(), "tests/test_end_to_end.py is missing"
    assert "commands_tested(Way.END_TO_END)" in test.read_text(encoding="utf-8")


def drawn_edges() -> set[tuple[str, str]]:
    return set(re.findall(r"^\s*(\w+) --> (\w+)$", blocks("mermaid")[0], flags=re.MULTILINE))


def real_edges() -> set[tuple[str, str]]:
    def feeds(one: Path, other: Path) -> bool:
        return one.is_relative_to(other) or other.is_relative_to(one)

    return {
        (maker.name, user.name)
        for maker in stages()
        for user in stages()
        if any(feeds(out, dep) for out in maker.outs for dep in user.deps)
    }


def test_the_picture_shows_every_stage() -> None:
    assert {name for edge in drawn_edges() for name in edge} == {stage.name for stage in stages()}


def test_the_picture_shows_no_edge_that_is_not_there() -> None:
    assert not drawn_edges() - real_edges()


def test_every_file_named_exists() -> None:
    text = README.read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:components|pipelines|tests|models|data)/[\w./]+|[\w.]+\.(?:yaml|txt|toml)|LICENSE)`", text)
    )
    known = {place.as_posix() for path in tracked_files() for place in (path, *path.parents)}
    outs = [out for stage in stages() for out in stage.outs]
    made = {name for name in named if any(Path(name).is_relative_to(out) or out.is_relative_to(name) for out in outs)}
    assert named, "the pattern finds nothing"
    assert not {name for name in named - made if name.rstrip("/") not in known}


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < LONGEST_README_LINES


def test_the_results_have_their_place() -> None:
    text = README.read_text(encoding="utf-8")
    assert re.search(r"<!-- results:begin -->.+<!-- results:end -->", text, flags=re.DOTALL)


# --- the installer, which both commands rely on -------------------------------------------------------------------


@pytest.fixture
def bare_folder(tmp_path: Path) -> Path:
    """A folder with what the installer reads, and nothing installed."""
    for name in (".ci/install", "Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make_install(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    return make(folder, "install", f"PYTHON={python}")


def fake_python(folder: Path, pip: str) -> str:
    """A `python3.11` that makes a venv whose pip is the shell script ``pip``."""
    (folder / "pip.sh").write_text(pip)
    script = folder / "python3.11"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *version_info*) echo 3.11;;\n"
        f'  "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch cleared;;\n'
        f'  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
        f'  "-m pip install"*) exec sh {folder}/pip.sh;;\n'
        "esac\n"
    )
    script.chmod(0o755)
    return str(script)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The error as told, make's own closing line left out."""
    assert done.returncode == 2
    return three_lines("\n".join(line for line in done.stderr.splitlines() if not line.startswith("make")))


def test_a_missing_python_has_three_lines(bare_folder: Path) -> None:
    assert "no-such-python" in told(make_install(bare_folder, "no-such-python"))[1]


@pytest.mark.parametrize(
    ("says", "wrong"),
    [
        ("connection broken by NewConnectionError: [Errno -3] Temporary failure in name resolution", "no network"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: No matching distribution found for torch==9", "cannot install"),
    ],
)
def test_a_failed_install_has_three_lines_and_the_next_one_starts_clean(
    bare_folder: Path, says: str, wrong: str
) -> None:
    python = fake_python(bare_folder, f"echo '{says}'; exit 1")
    assert wrong in told(make_install(bare_folder, python))[0]
    assert not (bare_folder / ".venv/.installed").exists()

    (bare_folder / "pip.sh").write_text("exit 0")
    again = make_install(bare_folder, python)
    assert again.returncode == 0, again.stderr
    assert (bare_folder / "cleared").exists(), "a half-unpacked package would have been taken for an installed one"
    assert (bare_folder / ".venv/.installed").exists()


def test_an_install_that_is_done_is_not_done_again(bare_folder: Path) -> None:
    python = fake_python(bare_folder, "echo pip >>pip.log")
    assert make_install(bare_folder, python).returncode == 0
    assert make_install(bare_folder, python).returncode == 0
    assert (bare_folder / "pip.log").read_text().split() == ["pip"]
    later = (bare_folder / ".venv/.installed").stat().st_mtime + 1  # a clock's tick may be longer than an install here
    os.utime(bare_folder / "constraints.txt", (later, later))
    assert make_install(bare_folder, python).returncode == 0
    assert (bare_folder / "pip.log").read_text().split() == ["pip", "pip"], "new pins must be installed"


# --- the page on own texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["sh", "python"])
def test_the_recipes_for_own_texts_give_lines_that_fill_slots(language: str, tmp_path: Path) -> None:
    """Run on three small files; every line that comes out must fill the slots of a task like those of params.yaml."""
    if language == "sh" and not shutil.which("jq"):
        pytest.skip("no jq here")
    messages = [{"text": f"message {number} to be | answered"} for number in range(4)]
    turns = [["user", "one tea please"], ["assistant", "with milk | or without"], ["user", "with"]]
    inputs = {"messages": messages, "dialogues": [{"turns": turns}] * 2, "benchmark": [{"turns": ["write", "more"]}]}
    for name, rows in inputs.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    page = (ROOT / "docs/evaluate-your-text.md").read_text(encoding="utf-8")
    recipes = [text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if not text.startswith("mtp")]
    assert recipes
    for recipe in recipes:
        command = ["sh", "-ec", recipe] if language == "sh" else [sys.executable, "-c", recipe]
        before = set(tmp_path.iterdir())
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        made = done.stdout + "".join(path.read_text() for path in sorted(set(tmp_path.iterdir()) - before))
        assert made.strip()
        for line in made.splitlines():
            rendered = "{notifications} {sender}" if "Anna: " in line else "{me} {text}"
            task = TaskPrompt(rendered=rendered, stop_texts=(), max_new_tokens=1)
            assert all(fill_from_row(task, json.loads(line)).values())
        for path in set(tmp_path.iterdir()) - before:
            path.unlink()


# --- the pages on tasks ---------------------------------------------------------------------------------------------


def page_blocks(name: str, language: str) -> list[str]:
    """Texts of a page's fenced blocks in ``language``."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("name", ["tasks.md", "mails.md"])
def test_the_examples_of_tasks_are_valid(name: str) -> None:
    document = load_params(ROOT / "params.yaml").model_dump(mode="json")
    tasks: dict[str, Any] = {}
    for text in page_blocks(name, "yaml"):
        tasks |= yaml.safe_load(text)["tasks"]
    assert len(tasks) == 2
    params = parse_params({**document, "tasks": {**document["tasks"], **tasks}})
    rows = [json.loads(text) for text in page_blocks(name, "json")]
    own = [params.tasks[task] for task in tasks if params.tasks[task].recipe == "jsonl"]
    assert own
    assert all(set(task.slots()) <= set(row) for row in rows for task in own)


def test_the_page_on_tasks_explains_every_key_and_every_recipe() -> None:
    table = "\n".join(re.findall(r"^\| `.*$", (ROOT / "docs/tasks.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert not {
        name for name in (*Task.model_fields, *RECIPE_BOUNDS) if f"| `{name}` |" not in table.replace("|| ", "| ")
    }
    for bounds in (recipes.STACK_MESSAGES, recipes.STACK_CHARACTERS, recipes.NOTE_CHARACTERS):
        assert str(list(bounds)) in table


MAIL = """From: Karl Heinz Example <karl@example.org>
To: list@example.org
Subject: Re: {subject}
Content-Type: text/plain

On Monday Wilhelmina wrote:
> a quoted line that is not mine
{body}
see http://example.org for more
Regards, karl
--
Karl Heinz, Example Inc
"""


def test_the_recipe_for_mails_gives_rows_without_names_quotes_and_links(tmp_path: Path) -> None:
    (script,) = page_blocks("mails.md", "python")
    folder = tmp_path / "package/data/easy-ham-1"
    folder.mkdir(parents=True)
    (tmp_path / "data/tasks").mkdir(parents=True)
    body = "Jennifer and I have looked at the window of the kitchen and found nothing to mend there. " * 5
    for number, (subject, text) in enumerate([("Window", body), ("window", body + "Again."), ("Short", "Too short.")]):
        mail = MAIL.format(subject=subject, body=text)
        (folder / f"{number}.json").write_text(json.dumps({"text": mail}), encoding="utf-8")
    (folder / "broken.json").write_text(json.dumps({"text": MAIL.replace("plain", "html")}), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in (tmp_path / "data/tasks/mails.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and "2 mails of 3" in done.stdout
    assert rows[0]["group"] == rows[1]["group"]
    for row in rows:
        assert 300 <= len(row["text"]) <= 1400
        assert not re.search(r"karl|heinz|jennifer|quoted|http|@|wilhelmina", row["text"], re.IGNORECASE)
        assert "found nothing to mend" in row["text"] and "Regards, " in row["text"]
        assert len(set(re.findall(r"(\w+) and I have", row["text"]))) == 1, "one name, one other name"
