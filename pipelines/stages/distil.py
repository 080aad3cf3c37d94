"""Stage `distil`: the frozen backbone answers the training and validation prompts; what the head reads is captured."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from components.core.config import Distil
from components.core.errors import exits_cleanly
from components.core.files import sha256_file, write_json
from components.core.host import allowed_cores, host_card
from components.core.paths import ANSWERS, BACKBONE, DISTILLATION_REPORT, DISTILLED, FEATURES, PROMPTS, TEMPLATES, WORK
from components.core.progress import Progress
from components.data.table import Prompt, read_prompts, read_templates
from components.decoding import stopping
from components.modeling import backbone, chunks, distill, features, packed
from components.modeling.answers import collect_answers, write_table
from components.modeling.chunks import make_chunks
from components.modeling.distill import Work, distil_chunks
from components.modeling.equality import Equality, compare_with_single
from components.modeling.features import shard_path
from pipelines.stages.common import stage_params

# The modules whose code decides a shard's bytes: half-finished shards of other code are not picked up.
SHARD_CODE = (backbone, chunks, distill, features, packed, stopping)


def work_folder(kv_layers: tuple[int, ...], settings: Distil) -> Path:
    """Folder of half-finished shards; its name changes with everything that changes a shard's bytes."""
    files = [PROMPTS, TEMPLATES, BACKBONE / "source.json", *(Path(str(module.__file__)) for module in SHARD_CODE)]
    parts = [
        [sha256_file(file) for file in files],
        kv_layers,
        settings.chunk_prompts,
        settings.slots,
        torch.__version__,
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return WORK / f"distil-{key}"


@dataclass(frozen=True)
class Run:
    """What this run decoded; prompts of a killed run that it took over are not in ``work``."""

    work: Work
    resumed_prompts: int
    wall_s: float
    processes: int


def decode_prompts(prompts: list[Prompt], kv_layers: tuple[int, ...], settings: Distil, folder: Path) -> Run:
    """Decode all prompts into shards below ``folder``, one process per core."""
    rows = [(prompt.prompt_id, prompt.task, prompt.prompt_ids) for prompt in prompts]
    units = make_chunks(rows, read_templates(TEMPLATES), settings.chunk_prompts)
    resumed = sum(len(unit.prompts) for unit in units if shard_path(folder, unit.number).exists())
    progress = Progress("distil", len(prompts), "prompts")
    progress.resume_at(resumed)
    processes, started, work = allowed_cores(), time.monotonic(), Work()
    for done in distil_chunks(units, BACKBONE, kv_layers, settings.slots, folder, processes):
        work += done
        progress.advance(done.prompts)
    return Run(work, resumed, time.monotonic() - started, processes)


def throughput(run: Run, equality: Equality) -> dict[str, Any]:
    """Figures of speed; the ratio compares answer tokens per second of one process, prefill included in both."""
    work, single = run.work, equality.tokens_per_s
    rate = work.answer_tokens / work.busy_s if work.busy_s else None
    return {
        "processes": run.processes,
        "wall_s": run.wall_s,
        "resumed_prompts": run.resumed_prompts,
        **asdict(work),
        "answer_tokens_per_s": work.answer_tokens / run.wall_s,
        "answer_tokens_per_s_per_process": rate,
        "single_answer_tokens_per_s_per_process": single,
        "ratio_to_single": rate / single if rate else None,
    }


def line(run: Run, speed: dict[str, Any]) -> str:
    """One line for people."""
    work = run.work
    if speed["ratio_to_single"] is None:
        return f"all {run.resumed_prompts} answers taken over from a killed run"
    return (
        f"{speed['answer_tokens_per_s_per_process']:.1f} tokens/s per process, {speed['ratio_to_single']:.1f} times "
        f"decoding singly ({run.processes} processes, {work.prompts} prompts, {run.wall_s:.0f} s; "
        f"{work.computed_tokens} prompt tokens computed, {work.shared_tokens} shared)"
    )


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
    """Write answers.parquet, the feature shards and distillation.json, whose times no later stage may depend on."""
    params = stage_params("distil")
    prompts = [prompt for prompt in read_prompts(PROMPTS) if prompt.split != "test"]
    folder = work_folder(params.head.kv_layers, params.distil)
    run = decode_prompts(prompts, params.head.kv_layers, params.distil, folder)
    answers = collect_answers(prompts, folder)
    templates = read_templates(TEMPLATES)
    equality = compare_with_single(answers, BACKBONE, templates, params.distil.equality_prompts, allowed_cores())
    equality.check()
    DISTILLED.mkdir(parents=True, exist_ok=True)
    write_table(ANSWERS, answers)
    speed = throughput(run, equality)
    summary = {
        "created_with": host_card("torch", "transformers").as_dict() | {"threads": 1, "precision": "float32"},
        "tasks": summarise(answers),
        "throughput": speed,
        "distilled_against_single": equality.as_dict(),
    }
    write_json(DISTILLATION_REPORT, summary)
    for left_over in folder.glob(".*.tmp"):  # of a shard whose writing was killed
        left_over.unlink()
    shutil.rmtree(FEATURES, ignore_errors=True)
    folder.rename(FEATURES)
    print(f"distil: {len(answers)} answers, {int(answers['answer_ids'].map(len).sum())} tokens; {equality.line()}")
    print(f"distil: {line(run, speed)}")


if __name__ == "__main__":
    main()
