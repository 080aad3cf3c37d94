"""The prompt table and the rendered templates as files: what `prompts` writes and every later stage reads.

Owns the columns and their types. It refuses a file that is not whole. Its surprising decision: it knows nothing of how
prompts are made, so a change to a recipe reruns the stages that use the *table* only when the table changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from components.core.errors import UserError
from components.core.files import atomic_path, read_json, write_json
from components.core.manifest import TaskPrompt

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt table.

    Args:
        prompt_id: sha256[:16] of task and slots.
        group: the conversation; never in two splits.
        source_text: the text the answer is about, as a person wrote it.
        prompt_ids: token ids, template included, exactly as a runtime makes them.
    """

    prompt_id: str
    task: str
    split: str
    group: str
    slots: Mapping[str, str]
    source_text: str
    prompt_ids: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Length in tokens."""
        return len(self.prompt_ids)


def first_of_each_task(prompts: Sequence[Prompt], split: str, limit: int) -> list[Prompt]:
    """The first ``limit`` prompts of each task in ``split``, by task; a prefix is a fair sample (see prompts.py)."""
    of_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.split == split:
            of_task.setdefault(prompt.task, []).append(prompt)
    return [prompt for rows in of_task.values() for prompt in rows[:limit]]


def schema() -> pyarrow.Schema:
    """Columns of prompts.parquet."""
    import pyarrow as pa

    text, ids = pa.string(), pa.list_(pa.int32())
    columns = ("prompt_id", "task", "split", "group", "slots", "source_text")
    return pa.schema([(name, text) for name in columns] + [("prompt_ids", ids), ("prompt_tokens", pa.int32())])


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write the table as Parquet, atomically; the same prompts give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            **{
                name: getattr(prompt, name)
                for name in ("prompt_id", "task", "split", "group", "source_text", "prompt_tokens")
            },
            "slots": json.dumps(dict(prompt.slots), ensure_ascii=False, sort_keys=True),
            "prompt_ids": list(prompt.prompt_ids),
        }
        for prompt in prompts
    ]
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema()), temporary, compression="zstd")


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read the table.

    Raises:
        UserError: missing, not Parquet, or without a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    remedy = "run `mtp repro prompts`"
    try:
        rows = pq.read_table(path, columns=[name for name in schema().names if name != "prompt_tokens"]).to_pylist()
        return tuple(
            Prompt(**{**row, "slots": json.loads(row["slots"]), "prompt_ids": tuple(row["prompt_ids"])}) for row in rows
        )
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "no such file", remedy) from None
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a prompt table", str(error), remedy) from None


def write_templates(path: Path, templates: Mapping[str, TaskPrompt]) -> None:
    """Write the rendered templates by task, atomically."""
    write_json(path, {name: template.model_dump(mode="json") for name, template in templates.items()})


def read_templates(path: Path) -> dict[str, TaskPrompt]:
    """Read the rendered templates by task.

    Raises:
        UserError: missing, not JSON, or of another shape.
    """
    remedy = "run `mtp repro prompts`"
    document = read_json(path, remedy)
    try:
        return {name: TaskPrompt.model_validate(template) for name, template in document.items()}
    except (ValidationError, AttributeError) as error:
        raise UserError(f"{path} does not hold prompt templates", str(error), remedy) from None
