"""Stage `distil`: the frozen backbone answers the training and validation prompts; what the head reads is captured."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer

from components.core.errors import exits_cleanly
from components.core.files import sha256_file, write_json
from components.core.host import allowed_cores, host_card
from components.core.paths import ANSWERS, BACKBONE, DISTILLED, DISTILLED_SUMMARY, FEATURES, PROMPTS, TEMPLATES, WORK
from components.core.progress import Progress
from components.data.table import Prompt, read_prompts, read_templates
from components.modeling.answers import collect_answers, write_table
from components.modeling.distill import distil_batches, make_batches
from components.modeling.equality import compare_with_single
from pipelines.stages.common import stage_params


def work_folder(kv_layers: tuple[int, ...], batch_rows: int) -> Path:
    """Folder of half-finished shards; its name changes with everything that changes a shard's bytes."""
    parts = [sha256_file(PROMPTS), sha256_file(TEMPLATES), sha256_file(BACKBONE / "source.json"), kv_layers, batch_rows]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return WORK / f"distil-{key}"


def decode_prompts(prompts: list[Prompt], kv_layers: tuple[int, ...], batch_rows: int, folder: Path) -> None:
    """Decode all prompts into shards below ``folder``, one process per core."""
    rows = [(prompt.prompt_id, prompt.task, prompt.prompt_ids) for prompt in prompts]
    batches = make_batches(rows, read_templates(TEMPLATES), batch_rows)
    progress = Progress("distil", len(prompts), "prompts")
    before = [batch for batch in batches if (folder / f"shard-{batch.number:05d}.safetensors").exists()]
    progress.resume_at(sum(len(batch.prompts) for batch in before))
    for count in distil_batches(batches, BACKBONE, kv_layers, folder, allowed_cores()):
        progress.advance(count)


def summarise(answers: pd.DataFrame) -> list[dict[str, object]]:
    """Figures per task and split."""
    return [
        {
            "task": task,
            "split": split,
            "prompts": len(part),
            "tokens": int(part["answer_ids"].map(len).sum()),
            "mean_answer_tokens": float(part["answer_ids"].map(len).mean()),
            "echo_rate": float(part["echo_rate"].mean()),
            "loop_share": float(part["looping"].mean()),
            "stop_reasons": {str(k): int(v) for k, v in part["stop_reason"].value_counts().sort_index().items()},
        }
        for (task, split), part in answers.groupby(["task", "split"])
    ]


@exits_cleanly
def main() -> None:
    """Write answers.parquet, summary.json and the feature shards."""
    params = stage_params("distil")
    prompts = [prompt for prompt in read_prompts(PROMPTS) if prompt.split != "test"]
    folder = work_folder(params.head.kv_layers, params.distil.batch_rows)
    decode_prompts(prompts, params.head.kv_layers, params.distil.batch_rows, folder)
    answers = collect_answers(prompts, folder)
    torch.set_num_threads(1)
    decode = Tokenizer.from_file(str(BACKBONE / "tokenizer.json")).decode
    equality = compare_with_single(answers, BACKBONE, read_templates(TEMPLATES), decode, params.distil.equality_prompts)
    DISTILLED.mkdir(parents=True, exist_ok=True)
    write_table(ANSWERS, answers)
    summary = {
        "created_with": host_card("torch", "transformers").as_dict() | {"threads": 1, "precision": "float32"},
        "tasks": summarise(answers),
        "batched_against_single": equality.as_dict(),
    }
    write_json(DISTILLED_SUMMARY, summary)
    shutil.rmtree(FEATURES, ignore_errors=True)
    folder.rename(FEATURES)
    print(f"distil: {len(answers)} answers, {int(answers['answer_ids'].map(len).sum())} tokens; {equality.line()}")


if __name__ == "__main__":
    main()
