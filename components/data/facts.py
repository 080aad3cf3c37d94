"""Facts about a table that no single cell shows, as plain columns for the data contracts (quality.py).

Owns what needs the tokenizer, the templates or other rows: leaks between splits, templates kept, answers that belong to
their prompts. It refuses to judge. Its surprising decision: on a table it cannot read (a column missing, nulls, wrong
types) it adds nothing rather than guess; the rules that need a fact then fail by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from components.core.config import Task
from components.core.errors import UserError
from components.core.manifest import TaskPrompt
from components.data.corpora import letter_share, word_ngrams
from components.data.prompts import FILL_ORDER
from components.data.template import control_tokens, fill_slots

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPT_COLUMNS = ("prompt_id", "task", "split", "group", "slots", "source_text", "prompt_ids", "prompt_tokens")
PROMPT_FACTS = (
    *("prompt_key", "length_gap", "task_splits", "group_splits", "shared_ngrams", "template_kept"),
    *("control_token_gap", "doubled_start", "broken_characters", "letter_share"),
)
ANSWER_COLUMNS = (
    *("prompt_id", "task", "split", "prompt_ids", "answer_ids", "answer"),
    *("stop_reason", "echo_rate", "looping", "shard", "row"),
)
ANSWER_FACTS = (
    *("answer_tokens", "over_budget", "blank", "loops", "prompt_differs", "place_taken"),
    *("task_loop_share", "task_coverage"),
)
LIST_COLUMNS = ("prompt_ids", "answer_ids")
TEXT_COLUMNS = ("prompt_id", "task", "split", "group", "slots", "source_text", "answer", "stop_reason")
NUMBER_COLUMNS = ("prompt_tokens", "echo_rate", "looping", "shard", "row")


def read_table(path: Path, remedy: str) -> pd.DataFrame:
    """A Parquet file as a frame.

    Raises:
        UserError: missing or not Parquet.
    """
    try:
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "no such file", remedy) from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a Parquet table", str(error), remedy) from None


def is_readable(frame: pd.DataFrame, columns: Sequence[str]) -> bool:
    """Whether facts can be computed: rows, every column, no nulls, and lists, texts and numbers where they belong.

    Where this is false the facts are left out, and the rules that need them fail by name.
    """
    if frame.empty or not set(columns) <= set(frame.columns) or bool(frame[list(columns)].isna().any(axis=None)):
        return False
    lists = [frame[name] for name in LIST_COLUMNS if name in columns]
    texts = [frame[name] for name in TEXT_COLUMNS if name in columns]
    numbers = [frame[name] for name in NUMBER_COLUMNS if name in columns]
    return (
        all(isinstance(value, list | np.ndarray) for column in lists for value in column)
        and all(isinstance(value, str) for column in texts for value in column)
        and all(pd.api.types.is_numeric_dtype(column) for column in numbers)
    )


def prompt_facts(
    frame: pd.DataFrame,
    templates: Mapping[str, TaskPrompt],
    tasks: Mapping[str, Task],
    tokenizer: Tokenizer,
    ngram: int,
) -> pd.DataFrame:
    """Add :data:`PROMPT_FACTS` to the prompt table.

    Columns:
        prompt_key: hash of the ids.
        length_gap: tokens miscounted.
        task_splits: splits that hold the row's task.
        group_splits: splits that hold the row's group.
        shared_ngrams: word runs shared with a split before it (train, test, validation).
        template_kept: "yes" where the ids decode to the filled template.
        control_token_gap: control tokens (turn markers, BOS) more or fewer than in the template.
        doubled_start: 1 where the first control token comes twice.
        broken_characters: undecodable or control characters in the source text.
        letter_share: of the source text; 1 for a user's own rows, which may be in any script.
    """
    if not is_readable(frame, PROMPT_COLUMNS):
        return frame
    frame = frame.copy()
    ids = [[int(token) for token in row] for row in frame["prompt_ids"]]
    control = control_tokens(tokenizer)
    control_ids = {tokenizer.token_to_id(token) for token in control}
    rendered = [templates[task].rendered if task in templates else "" for task in frame["task"]]
    in_template = {text: sum(token in control_ids for token in _encode(tokenizer, text)) for text in set(rendered)}
    frame["prompt_key"] = [hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in ids]
    frame["length_gap"] = [count - len(row) for count, row in zip(frame["prompt_tokens"], ids, strict=True)]
    frame["task_splits"] = frame.groupby("task")["split"].transform("nunique")
    frame["group_splits"] = frame.groupby("group")["split"].transform("nunique")
    frame["shared_ngrams"] = _shared_ngrams(frame, ngram)
    frame["template_kept"] = [
        "yes" if _filled(text, slots, control) == tokenizer.decode(row, skip_special_tokens=False) else "no"
        for text, slots, row in zip(rendered, frame["slots"], ids, strict=True)
    ]
    frame["control_token_gap"] = [
        sum(token in control_ids for token in row) - in_template[text] for text, row in zip(rendered, ids, strict=True)
    ]
    frame["doubled_start"] = [int(len(row) > 1 and row[0] in control_ids and row[0] == row[1]) for row in ids]
    frame["broken_characters"] = [_broken(text) for text in frame["source_text"]]
    own = {name for name, task in tasks.items() if task.recipe == "jsonl"}
    frame["letter_share"] = [
        1.0 if task in own else letter_share(text)
        for task, text in zip(frame["task"], frame["source_text"], strict=True)
    ]
    return frame


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]


def _filled(rendered: str, slots: str, control: tuple[str, ...]) -> str | None:
    """The filled template, None where the slots cannot fill it."""
    try:
        return fill_slots(rendered, {str(name): str(value) for name, value in json.loads(slots).items()}, control)
    except (ValueError, AttributeError, UserError):
        return None


def _broken(text: str) -> int:
    return sum(character == "\ufffd" or (not character.isprintable() and character not in "\n\t") for character in text)


def _shared_ngrams(frame: pd.DataFrame, ngram: int) -> list[int]:
    """Per row, word runs of its source text that also occur in a split before its own."""
    runs = [word_ngrams(text, ngram) for text in frame["source_text"]]
    before: dict[str, set[tuple[str, ...]]] = {}
    known: set[tuple[str, ...]] = set()
    for split in FILL_ORDER:
        before[split] = set(known)
        known.update(*(run for run, own in zip(runs, frame["split"], strict=True) if own == split))
    return [len(run & before.get(split, set())) for run, split in zip(runs, frame["split"], strict=True)]


def answer_facts(frame: pd.DataFrame, prompts: pd.DataFrame, templates: Mapping[str, TaskPrompt]) -> pd.DataFrame:
    """Add :data:`ANSWER_FACTS` to the distilled answers.

    Columns:
        answer_tokens: length of the answer.
        over_budget: tokens beyond the task's limit; negative where room was left.
        blank, loops: 0 or 1.
        prompt_differs: 1 where ids, task or split are not those of the prompt table.
        place_taken: 1 where two rows claim one row of one feature shard.
        task_loop_share: looping answers over all answers of the task.
        task_coverage: answers of the task over its train and validation prompts.
    """
    if not is_readable(frame, ANSWER_COLUMNS) or not is_readable(prompts, PROMPT_COLUMNS):
        return frame
    frame = frame.copy()
    known = dict(zip(prompts["prompt_id"], _identities(prompts), strict=True))
    frame["answer_tokens"] = [len(ids) for ids in frame["answer_ids"]]
    budget = {name: template.max_new_tokens for name, template in templates.items()}
    frame["over_budget"] = [
        count - budget.get(task, 0) for count, task in zip(frame["answer_tokens"], frame["task"], strict=True)
    ]
    frame["blank"] = [int(not answer.strip()) for answer in frame["answer"]]
    frame["loops"] = frame["looping"].astype(int)
    frame["prompt_differs"] = [
        int(known.get(name) != identity) for name, identity in zip(frame["prompt_id"], _identities(frame), strict=True)
    ]
    frame["place_taken"] = (frame.duplicated(["shard", "row"], keep=False) & (frame["shard"] >= 0)).astype(int)
    frame["task_loop_share"] = frame.groupby("task")["loops"].transform("mean")
    wanted = prompts[prompts["split"] != "test"].groupby("task").size()
    frame["task_coverage"] = [
        count / wanted.get(task, 1)
        for count, task in zip(frame.groupby("task")["task"].transform("size"), frame["task"], strict=True)
    ]
    return frame


def _identities(frame: pd.DataFrame) -> list[tuple[str, str, tuple[int, ...]]]:
    """Task, split and ids of every row."""
    ids = (tuple(int(token) for token in row) for row in frame["prompt_ids"])
    return list(zip(frame["task"], frame["split"], ids, strict=True))
