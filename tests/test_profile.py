"""`mtp profile`: what changes in params.yaml, what stays, and that the five tasks of `full` can be built."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from components.core.config import SplitSizes
from components.core.errors import UserError
from components.core.params import load_params, parse_params
from components.data.facts import prompt_facts, read_table
from components.data.prompts import Corpus, build_prompts
from components.data.quality import judge, prompt_rules
from components.data.table import write_prompts
from components.data.template import encode_prompt
from helpers_data import MISSPELLINGS, NAMES, make_chats
from pipelines import cli
from pipelines.profile import PROFILES, apply_profile, profile_files
from pipelines.stages.prompts import render_tasks
from pipelines.yaml_merge import merge_text, merged_values

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = (ROOT / "params.yaml").read_text(encoding="utf-8")


OWN_REWRITE = 'tasks:\n  rewrite:\n    recipe: jsonl\n    path: mine.jsonl\n    user: "{text}"\n'


@pytest.fixture
def params_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the committed parameters."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "params.yaml"
    path.write_text(COMMITTED, encoding="utf-8")
    return path


def mtp(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["mtp", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


# --- the merge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "extra", "merged"),
    [
        ("a: 1   # one\nb: 2\n", "a: 3\n", "a: 3   # one\nb: 2\n"),
        ("a: 'x'\n", "a: [1, 2]\n", "a: [1, 2]\n"),
        ("a: {x: 1, y: 2}  # k\n", "a: {y: 3}\n", "a: {x: 1, y: 3}  # k\n"),
        ("a: {x: 1}  # k\n", "a:\n  z: 3\n", "a: {x: 1, z: 3}  # k\n"),
        ("a:\n  x: 1 # k\n\n# n\nb: 2\n", "a:\n  y: 2  # new\n", "a:\n  x: 1 # k\n  y: 2  # new\n\n# n\nb: 2\n"),
        ("a:\n    x: 1\nb: 2\n", "a:\n  y:\n    z: |\n     t\n", "a:\n    x: 1\n    y:\n      z: |\n       t\nb: 2\n"),
        ("a:\n  - 1\n  - 2\n\nb: 3\n", "a: [4]\n", "a:\n  [4]\n\nb: 3\n"),
        ("a: |\n  text\n  more\nb: 1", "a: short\nc: 2\n", "a: short\nb: 1\nc: 2"),
        ("\u00e4: \u20ac  # \U0001f600\nb: 1\n", "b: 2\n", "\u00e4: \u20ac  # \U0001f600\nb: 2\n"),
    ],
)  # fmt: skip
def test_a_merge_touches_nothing_but_what_changes(text: str, extra: str, merged: str) -> None:
    assert merge_text(text, extra, "it") == merged
    assert yaml.safe_load(merged) == merged_values(yaml.safe_load(text), yaml.safe_load(extra))
    assert merge_text(merged, extra, "it") == merged


@pytest.mark.parametrize("text", ["a: &x 1\nb: *x\n", "a: {x: {y: 1}}\nb: *z\n", "a:\nb: 1\n"])
def test_what_cannot_be_merged_safely_is_refused(text: str) -> None:
    with pytest.raises((UserError, yaml.YAMLError)):
        merge_text(text, "a: 2\nb: {c: 1}\n", "it")


# --- the command --------------------------------------------------------------------------------------------------


def test_full_changes_what_it_names_and_keeps_every_other_line(params_file: Path) -> None:
    lines = apply_profile("full")
    after = params_file.read_text(encoding="utf-8")
    profile = yaml.safe_load((PROFILES / "full.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(after) == merged_values(yaml.safe_load(COMMITTED), profile)
    assert set(load_params().tasks) == {*yaml.safe_load(COMMITTED)["tasks"], "rewrite", "long_summary"}
    rows = yaml.safe_load(COMMITTED)["runtime"]["max_length"], profile["runtime"]["max_length"]
    assert "runtime.max_length: {} -> {}".format(*rows) in lines
    assert any(line.startswith("tasks.rewrite: not there -> {") for line in lines)
    assert "git checkout params.yaml" in lines[-1] and "make repro" in lines[-1]
    gone = [line for line in difflib.ndiff(COMMITTED.splitlines(), after.splitlines()) if line.startswith("- ")]
    numbers = [line for line in lines[:-1] if "not there" not in line]
    assert len(gone) == len(numbers) > 3, "one line for each number that differs"


def test_a_second_time_changes_nothing(params_file: Path) -> None:
    apply_profile("full")
    before, stamp = params_file.read_bytes(), params_file.stat().st_mtime_ns
    assert "nothing changed" in apply_profile("full")[0]
    assert (params_file.read_bytes(), params_file.stat().st_mtime_ns) == (before, stamp)


def test_profiles_are_listed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mtp(monkeypatch, "profile") == 0
    shown = capfd.readouterr().out
    assert all(f"{name}: " in shown for name in profile_files())
    assert "mtp profile NAME" in shown


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("fast", COMMITTED, "no profile 'fast'"),
        ("full", None, "no project folder"),
        ("full", "a: [1", "not valid YAML"),
        ("full", COMMITTED.replace("epochs:", "epoch:"), "train.epoch"),
        ("full", COMMITTED.replace("tasks:\n", OWN_REWRITE), "with profile full"),
    ],
)
def test_what_cannot_be_applied_is_three_lines_and_writes_nothing(
    name: str,
    content: str | None,
    told: str,
    params_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if content is None:
        params_file.unlink()
    else:
        params_file.write_text(content, encoding="utf-8")
    assert mtp(monkeypatch, "profile", name) == 2
    error = capfd.readouterr().err.splitlines()
    assert [line[:7] for line in error] == ["error: ", " seen: ", " next: "]
    assert told in error[0]
    assert content is None or params_file.read_text(encoding="utf-8") == content
    assert len(list(params_file.parent.iterdir())) == (content is not None)


def test_profiles_are_installed_with_the_package() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = document["tool"]["setuptools"]["package-data"]["pipelines"]
    shipped = {path for pattern in patterns for path in (ROOT / "pipelines").glob(pattern)}
    assert set(profile_files().values()) == shipped != set()


# --- the five tasks -----------------------------------------------------------------------------------------------


def full_params(**sizes: int) -> Any:
    """The committed parameters with the profile `full`, at test size."""
    profile = (PROFILES / "full.yaml").read_text(encoding="utf-8")
    params = parse_params(yaml.safe_load(merge_text(COMMITTED, profile, "params.yaml")))
    # The test's tokenizer makes four times as many tokens as the real one.
    data = params.data.model_copy(update={"prompts_per_task": SplitSizes(**sizes), "max_prompt_tokens": 2500})
    return params.model_copy(update={"data": data})


def test_a_task_of_the_profile_is_an_entry_and_no_code() -> None:
    """Nothing but YAML knows the tasks by name."""
    profile = yaml.safe_load((PROFILES / "full.yaml").read_text(encoding="utf-8"))
    code = [path for folder in ("components", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    assert code
    for name in profile["tasks"]:
        assert not [path for path in code if f'"{name}"' in path.read_text(encoding="utf-8")]


def test_the_five_tasks_are_built_from_the_corpora_and_pass_the_contract(
    tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    params = full_params(train=8, validation=2, test=4)
    templates = render_tasks(tiny_backbone_dir, params.tasks)
    tokenizer = Tokenizer.from_file(str(tiny_backbone_dir / "tokenizer.json"))
    corpus = Corpus(make_chats(120, messages=26, sentences=2), MISSPELLINGS, NAMES)
    prompts = build_prompts(
        params.tasks,
        params.data,
        corpus,
        lambda task, slots: encode_prompt(tokenizer, templates[task].rendered, slots),
    )
    assert len(prompts) == 5 * 14
    rewrites = {(p.slots["tone"], p.slots["limit"]) for p in prompts if p.task == "rewrite"}
    assert len(rewrites) > 3
    assert {len(p.source_text) >= 100 for p in prompts if p.task == "rewrite"} == {True}
    assert {8 <= p.source_text.count("\n") + 1 <= 20 for p in prompts if p.task == "long_summary"} == {True}
    assert templates["rewrite"].answer_prefix == "Rewritten:"
    assert templates["rewrite"].choices == params.tasks["rewrite"].choices
    write_prompts(tmp_path / "prompts.parquet", prompts)
    table = read_table(tmp_path / "prompts.parquet", "make it")
    facts = prompt_facts(table, templates, params.tasks, tokenizer, params.data.deduplicate_ngram)
    rules = prompt_rules(list(params.tasks), params.data.max_prompt_tokens)
    report = judge(facts, "prompts", rules, tmp_path / "docs")
    assert report.passed, report.failed()
