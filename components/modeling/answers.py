"""The distilled data set: a table of answers beside the captured shards.

Owns the columns of answers.parquet and which answers are left out of training. Looping answers stay in the table,
flagged: they are real outputs, but a head trained on them learns to flatter itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from components.core.files import atomic_path
from components.data.table import Prompt
from components.decoding.metrics import echo_rate, is_looping
from components.modeling.features import read_shard


def collect_answers(prompts: Iterable[Prompt], features: Path) -> pd.DataFrame:
    """Join every captured sequence below ``features`` with its prompt's task and split."""
    known = {prompt.prompt_id: prompt for prompt in prompts}
    rows = []
    for number, path in enumerate(sorted(features.glob("shard-*.safetensors"))):
        for row, sequence in enumerate(read_shard(path)):
            prompt = known[sequence.prompt_id]
            rows.append(
                {
                    "prompt_id": sequence.prompt_id,
                    "task": prompt.task,
                    "split": prompt.split,
                    "prompt_ids": list(sequence.prompt),
                    "answer_ids": list(sequence.answer),
                    "answer": sequence.text,
                    "stop_reason": sequence.stop_reason,
                    "echo_rate": echo_rate(sequence.prompt, sequence.answer),
                    "looping": is_looping(sequence.answer),
                    "shard": number,
                    "row": row,
                }
            )
    return pd.DataFrame(rows)


def write_table(target: Path, table: pd.DataFrame) -> None:
    """Write a Parquet file, atomically and with the same bytes for the same rows."""
    with atomic_path(target) as temporary:
        table.to_parquet(temporary, index=False)


def training_prompts(answers: pd.DataFrame) -> set[str]:
    """Names of the prompts whose answers train the head: training split, not looping, at least two tokens."""
    usable = (answers["split"] == "train") & ~answers["looping"] & (answers["answer_ids"].map(len) >= 2)
    return set(answers.loc[usable, "prompt_id"])
