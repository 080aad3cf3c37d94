"""Data contracts, judged by the real Great Expectations on a small table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
import pytest
from tokenizers import Tokenizer

from components.core.errors import EXIT_USER_ERROR, UserError
from components.core.manifest import TaskPrompt
from components.data.facts import ANSWER_COLUMNS, PROMPT_COLUMNS, answer_facts, prompt_facts, read_table
from components.data.prompts import Corpus, build_prompts
from components.data.quality import ContractReport, Rule, answer_rules, judge, prompt_rules, require, write_report
from components.data.table import write_prompts, write_templates
from components.data.template import encode_prompt, render_prompt
from helpers_data import MISSPELLINGS, NAMES, TASKS, data_params, make_chats

MOST = 400
Frame = pd.DataFrame
Change = Callable[[Frame], object]


@pytest.fixture(scope="module")
def tokenizer(tiny_backbone_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_backbone_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def templates(tiny_backbone_dir: Path) -> Mapping[str, TaskPrompt]:
    from transformers import AutoTokenizer

    chat_template = AutoTokenizer.from_pretrained(tiny_backbone_dir, local_files_only=True)
    return {
        name: TaskPrompt(rendered=render_prompt(chat_template, task), stop_texts=task.stop_texts, max_new_tokens=16)
        for name, task in TASKS.items()
    }


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer, templates: Mapping[str, TaskPrompt], tmp_path_factory: pytest.TempPathFactory) -> Frame:
    corpus = Corpus(make_chats(120), MISSPELLINGS, NAMES)
    prompts = build_prompts(
        TASKS,
        data_params(most=MOST),
        corpus,
        lambda task, slots: encode_prompt(tokenizer, templates[task].rendered, slots),
    )
    path = tmp_path_factory.mktemp("table") / "prompts.parquet"
    write_prompts(path, prompts)
    return read_table(path, "make it")


@pytest.fixture(scope="module")
def answers(table: Frame) -> Frame:
    rows = table[table["split"] != "test"]
    ids = [[number, number + 1, 2] for number in range(len(rows))]
    return pd.DataFrame(
        {
            **{name: rows[name].to_list() for name in ("prompt_id", "task", "split", "prompt_ids")},
            "answer_ids": ids,
            "answer": ["an answer"] * len(rows),
            "stop_reason": ["eos"] * len(rows),
            "echo_rate": [0.25] * len(rows),
            "looping": [False] * len(rows),
            "shard": [number // 10 for number in range(len(rows))],
            "row": [number % 10 for number in range(len(rows))],
        }
    )


@pytest.fixture
def judge_prompts(
    tokenizer: Tokenizer, templates: Mapping[str, TaskPrompt], tmp_path: Path
) -> Callable[[Frame], ContractReport]:
    def run(frame: Frame) -> ContractReport:
        facts = prompt_facts(frame, templates, TASKS, tokenizer, 8)
        return judge(facts, "prompts", prompt_rules(list(TASKS), MOST), tmp_path / "docs")

    return run


def failed_columns(report: ContractReport) -> set[str]:
    return {outcome.column for outcome in report.failed()}


def put(frame: Frame, column: str, row: int, value: object) -> None:
    """Set one cell in place; a list column needs the type `object`."""
    if not isinstance(value, int | str):
        frame[column] = frame[column].astype(object)
    frame.at[frame.index[row], column] = value


def row_of(frame: Frame, split: str) -> int:
    return int((frame["split"] == split).to_numpy().argmax())


# --- the prompt table ---------------------------------------------------------------------------------------------


def test_a_good_table_passes_with_evidence(
    judge_prompts: Callable[[Frame], ContractReport], table: Frame, tmp_path: Path
) -> None:
    report = judge_prompts(table)
    assert report.passed
    assert report.rows == len(table) > 0
    assert len(report.expectations) > 30
    assert (tmp_path / "docs" / "index.html").is_file()
    write_report(tmp_path / "prompts.json", report)
    document = json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))
    assert document["created_with"]["packages"]["great_expectations"]
    assert (document["suite"], document["passed"], document["rows"]) == ("prompts", True, len(table))
    assert set(document["expectations"][0]) == {"expectation", "column", "passed", "observed"}
    require(report, tmp_path)


def duplicate_prompt(frame: Frame) -> None:
    put(frame, "prompt_ids", 1, frame["prompt_ids"].iloc[0])


def two_splits(frame: Frame) -> None:
    put(frame, "group", row_of(frame, "test"), frame["group"].iloc[row_of(frame, "train")])


def copied_text(frame: Frame) -> None:
    put(frame, "source_text", row_of(frame, "test"), frame["source_text"].iloc[row_of(frame, "train")].upper())


def without_validation(frame: Frame) -> None:
    """One task loses its validation prompts to training."""
    frame.loc[(frame["task"] == "reply") & (frame["split"] == "validation"), "split"] = "train"


def extra_bos(frame: Frame) -> None:
    ids = frame["prompt_ids"].iloc[0]
    put(frame, "prompt_ids", 0, [ids[0], *ids])


# Several faults to a table, since a judgement takes seconds; within one, no fault touches the rule of another.
PROMPT_FAULTS: tuple[dict[str, tuple[Change, str]], ...] = (
    {
        "an id comes twice": (lambda f: put(f, "prompt_id", 1, f["prompt_id"].iloc[0]), "prompt_id"),
        "a conversation is in two splits": (two_splits, "group_splits"),
        "a test text is copied from training": (copied_text, "shared_ngrams"),
        "undecodable text": (lambda f: put(f, "source_text", 2, "caf\ufffd au lait"), "broken_characters"),
        "not the template's language": (lambda f: put(f, "source_text", 3, "это не тот язык"), "letter_share"),
        "slots that are not JSON": (lambda f: put(f, "slots", 4, "{"), "template_kept"),
        "too long": (lambda f: put(f, "prompt_tokens", 5, MOST + 1), "prompt_tokens"),
    },
    {
        "a prompt comes twice": (duplicate_prompt, "prompt_key"),
        "an unknown split": (lambda f: put(f, "split", 2, "dev"), "split"),
        "an unknown task": (lambda f: put(f, "task", 3, "chat"), "task"),
        "miscounted": (lambda f: put(f, "prompt_tokens", 4, 3), "length_gap"),
    },
    {
        "a doubled start": (extra_bos, "doubled_start"),
        "a turn marker too many": (extra_bos, "control_token_gap"),
        "a task lacks a split": (without_validation, "task_splits"),
    },
    {
        "the answer opening is cut off": (
            lambda f: put(f, "prompt_ids", 0, f["prompt_ids"].iloc[0][:-8]),
            "template_kept",
        )
    },
    {"a column is missing": (lambda f: f.pop("group"), "group")},
    {"a null": (lambda f: put(f, "source_text", 0, None), "source_text")},
)


@pytest.mark.parametrize("faults", PROMPT_FAULTS, ids=", ".join)
def test_a_fault_in_the_prompts_fails_the_rule_for_it(
    judge_prompts: Callable[[Frame], ContractReport], table: Frame, faults: dict[str, tuple[Change, str]]
) -> None:
    frame = table.copy()
    for change, _ in faults.values():
        change(frame)
    report = judge_prompts(frame)
    assert not report.passed
    assert {column for _, column in faults.values()} <= failed_columns(report)


@pytest.mark.parametrize(
    ("column", "value"), [("source_text", 3), ("prompt_tokens", "many"), ("prompt_ids", "1 2"), ("slots", None)]
)
def test_no_fact_is_guessed_where_a_column_holds_something_else(
    table: Frame, templates: Mapping[str, TaskPrompt], tokenizer: Tokenizer, column: str, value: object
) -> None:
    frame = table.copy()
    frame[column] = value
    assert set(prompt_facts(frame, templates, TASKS, tokenizer, 8).columns) == set(PROMPT_COLUMNS)


@pytest.mark.parametrize("kind", ["header only", "no columns", "all null", "filtered"])
def test_a_table_that_holds_nothing_fails(
    judge_prompts: Callable[[Frame], ContractReport], table: Frame, kind: str
) -> None:
    frame = {
        "header only": pd.DataFrame({name: [] for name in PROMPT_COLUMNS}),
        "no columns": pd.DataFrame(),
        "all null": pd.DataFrame({name: [None] * 5 for name in PROMPT_COLUMNS}),
        "filtered": table[table["split"] == "none"],
    }[kind]
    report = judge_prompts(frame)
    assert not report.passed
    assert report.failed()


# --- the judge itself ----------------------------------------------------------------------------------------------


def test_a_contract_without_rules_is_refused(table: Frame, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rule"):
        judge(table, "empty", (), tmp_path / "docs")


@pytest.mark.parametrize(
    "rule",
    [
        Rule("ExpectColumnValuesToBeSplendid", {"column": "task"}),
        Rule("ExpectColumnValuesToNotBeNull", {"colum": "task"}),
        Rule("ExpectColumnValuesToBeInSet", {"column": "task", "value_set": 3}),
    ],
)
def test_a_broken_rule_is_refused_by_name(table: Frame, tmp_path: Path, rule: Rule) -> None:
    with pytest.raises(UserError) as caught:
        judge(table, "broken", (rule,), tmp_path / "docs")
    assert rule.expectation in caught.value.render()


def test_rows_are_needed_even_where_every_rule_is_content_with_none(tmp_path: Path) -> None:
    rule = Rule("ExpectColumnValuesToBeInSet", {"column": "task", "value_set": ["a"]})
    report = judge(pd.DataFrame({"task": pd.Series([], dtype="str")}), "none", (rule,), tmp_path / "docs")
    assert not report.passed
    with pytest.raises(UserError, match="0 rows"):
        require(report, tmp_path)


# --- the distilled answers ----------------------------------------------------------------------------------------


def loops(frame: Frame) -> None:
    frame["looping"] = frame["task"] == "reply"


def tail_of_a_task(frame: Frame) -> None:
    """Most of one task's answers become another's."""
    frame.loc[frame.index[frame["task"] == "reply"][3:], "task"] = "proofread"


ANSWER_FAULTS: tuple[dict[str, tuple[Change, str]], ...] = (
    {
        "an answer comes twice": (lambda f: put(f, "prompt_id", 1, f["prompt_id"].iloc[0]), "prompt_id"),
        "no tokens": (lambda f: put(f, "answer_ids", 2, []), "answer_tokens"),
        "over the budget": (lambda f: put(f, "answer_ids", 3, [1] * 17), "over_budget"),
        "no answers": (lambda f: f.__setitem__("answer", " "), "blank"),
        "one task loops": (loops, "task_loop_share"),
        "an unknown end": (lambda f: put(f, "stop_reason", 4, "tired"), "stop_reason"),
        "a test prompt": (lambda f: put(f, "split", 5, "test"), "split"),
        "two answers in one place": (lambda f: f.__setitem__("row", 0), "place_taken"),
        "an echo of two": (lambda f: f.__setitem__("echo_rate", 2.0), "echo_rate"),
    },
    {"other ids than the prompt's": (lambda f: put(f, "prompt_ids", 0, f["prompt_ids"].iloc[1]), "prompt_differs")},
    {
        "a split of its own": (lambda f: put(f, "split", row_of(f, "train"), "validation"), "prompt_differs"),
        "all loop": (lambda f: f.__setitem__("looping", True), "loops"),
        "most of a task is gone": (tail_of_a_task, "task_coverage"),
    },
    {
        "a task is gone": (lambda f: f.__setitem__("task", f["task"].replace("reply", "proofread")), "task"),
    },
    {"a null answer": (lambda f: put(f, "answer", 0, None), "answer")},
    {"a column is missing": (lambda f: f.pop("looping"), "looping")},
)


def judge_answers(frame: Frame, table: Frame, templates: Mapping[str, TaskPrompt], docs: Path) -> ContractReport:
    return judge(answer_facts(frame, table, templates), "distilled", answer_rules(list(templates)), docs)


def test_good_answers_pass(answers: Frame, table: Frame, templates: Mapping[str, TaskPrompt], tmp_path: Path) -> None:
    report = judge_answers(answers, table, templates, tmp_path / "docs")
    assert report.passed, report.failed()
    assert set(ANSWER_COLUMNS) == set(answers.columns)


@pytest.mark.parametrize("faults", ANSWER_FAULTS, ids=", ".join)
def test_a_fault_in_the_answers_fails_the_rule_for_it(
    answers: Frame,
    table: Frame,
    templates: Mapping[str, TaskPrompt],
    tmp_path: Path,
    faults: dict[str, tuple[Change, str]],
) -> None:
    frame = answers.copy()
    for change, _ in faults.values():
        change(frame)
    report = judge_answers(frame, table, templates, tmp_path / "docs")
    assert not report.passed
    assert {column for _, column in faults.values()} <= failed_columns(report)


def test_no_answers_at_all_fail(
    answers: Frame, table: Frame, templates: Mapping[str, TaskPrompt], tmp_path: Path
) -> None:
    report = judge_answers(answers[answers["answer"] == "none such"], table, templates, tmp_path / "docs")
    assert not report.passed
    assert "task" in failed_columns(report)


# --- the stage ----------------------------------------------------------------------------------------------------


def test_the_stage_leaves_its_report_and_then_fails(
    table: Frame,
    templates: Mapping[str, TaskPrompt],
    tiny_backbone_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pipelines.stages.check_prompts as stage

    class Params:
        tasks = TASKS
        data = data_params(most=MOST)

    frame = table.copy()
    two_splits(frame)
    frame.to_parquet(tmp_path / "prompts.parquet", index=False)
    write_templates(tmp_path / "templates.json", templates)
    monkeypatch.setattr(stage, "stage_params", lambda name: Params())
    places = {
        "BACKBONE": tiny_backbone_dir,
        "PROMPTS": tmp_path / "prompts.parquet",
        "TEMPLATES": tmp_path / "templates.json",
        "CONTRACTS": tmp_path / "contracts",
        "DATA_DOCS": tmp_path / "docs",
    }
    for name, place in places.items():
        monkeypatch.setattr(stage, name, place)
    with pytest.raises(SystemExit) as caught:
        stage.main()
    assert caught.value.code == EXIT_USER_ERROR
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 3
    assert "group_splits" in said[1]
    document = json.loads((tmp_path / "contracts" / "prompts.json").read_text(encoding="utf-8"))
    assert document["passed"] is False
    assert (tmp_path / "docs" / "prompts" / "index.html").is_file()
