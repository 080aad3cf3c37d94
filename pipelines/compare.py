"""`mtp compare`: the head against baselines trained on the same answers, and the memory that it saves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer

from components.baselines import eagle, medusa, standalone, training
from components.baselines.contest import Contender, Timed, run_contest
from components.baselines.memory import memory_rows, memory_saved
from components.baselines.roster import GENERIC, Roster
from components.baselines.rows import OVERALL, drafter_rows, plain_seconds
from components.baselines.ways import MTP
from components.core.errors import UserError
from components.core.files import read_json, sha256_file, write_json
from components.core.host import host_card, resolve_threads, set_quiet_environment
from components.core.manifest import read_policies
from components.core.params import load_params
from components.core.paths import (
    ANSWERS,
    BACKBONE,
    BUNDLE,
    COMPARISON_REPORT,
    FEATURES,
    HEAD,
    POLICY,
    PROMPTS,
    TEMPLATES,
    TRAINING_REPORT,
    WORK,
)
from components.core.progress import Progress
from components.data.table import Prompt, first_of_each_task, read_prompts, read_templates
from components.decoding.bootstrap import Bootstrap
from components.devices.shared_rows import look_at_addresses
from components.modeling.answers import training_prompts
from components.modeling.backbone import load_backbone
from components.modeling.features import Sequence, read_shards
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator
from components.onnx.runtime import open_bundle


def training_sequences() -> dict[str, list[Sequence]]:
    """The answers that trained the head, by task.

    Raises:
        UserError: there are none.
    """
    answers = pd.read_parquet(ANSWERS)
    tasks = dict(zip(answers["prompt_id"], answers["task"], strict=True))
    wanted = training_prompts(answers)
    found: dict[str, list[Sequence]] = {}
    for sequence in read_shards(FEATURES):
        if sequence.prompt_id in wanted:
            found.setdefault(tasks[sequence.prompt_id], []).append(sequence)
    if not found:
        raise UserError("no answer is fit for training", f"{len(answers)} answers", "check data/distilled")
    return found


def work_folder(params: Any) -> Path:
    """Folder of finished weights; its name changes with all that they are made from, and with nothing else."""
    code = [Path(str(module.__file__)) for module in (eagle, medusa, standalone, training)]
    files = [sha256_file(path) for path in (ANSWERS, BACKBONE / "source.json", HEAD / "config.json", *code)]
    shapes = params.compare.model_dump(mode="json", include={"seed", "standalone", "finetune_epochs", "medusa_blocks"})
    key = json.dumps([files, params.train.model_dump(), shapes], sort_keys=True)
    return WORK / f"compare-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def forget_older(folder: Path) -> None:
    """Remove weights that were made from something else."""
    for other in folder.parent.glob("compare-*"):
        if other != folder:
            shutil.rmtree(other)


def cost_of_head() -> dict[str, Any]:
    """What the head's own training reports, in the baselines' words; it may have stopped before its last epoch."""
    report = read_json(TRAINING_REPORT, "run `mtp repro train`")
    epochs = len(report["validation"])
    seen = epochs * report["supervised_positions"][0]
    return {"epochs": epochs, "steps": report["steps"], "supervised_answer_tokens": seen}


def drafter_document(contender: Contender, outcomes: list[Timed], tasks: list[str], params: Any) -> dict[str, Any]:
    """Everything about one drafter but its bytes."""
    bootstrap = Bootstrap(params.evaluate.bootstrap_samples, params.evaluate.seed)
    return {
        "name": contender.name,
        "about": contender.about,
        "parameters": contender.parameters or None,
        "draft_length": contender.draft_length,
        "training": dict(contender.training),
        **drafter_rows(contender, outcomes, tasks, bootstrap, params.drafting),
    }


def compare(params: Any, evaluator: LiveEvaluator, prompts: list[Prompt], folder: Path) -> dict[str, Any]:
    """Train, decode, measure; plain data for JSON."""
    settings = params.compare
    torch.set_num_threads(resolve_threads(params.runtime.threads))
    head = MTPHead.from_pretrained(HEAD)
    roster = Roster(evaluator, head, training_sequences(), params.train, settings, folder)
    contenders = roster.contenders(cost_of_head(), read_policies(POLICY), params.benchmark.lookup_ngram)
    forget_older(folder)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]  # one thread of our own and the trainer's last minute; far above, times mean nothing
    progress = Progress("compare", len(prompts), "prompts")
    outcomes = run_contest(evaluator, contenders, prompts, progress.advance)
    tokens = [token for prompt in prompts for token in prompt.prompt_ids]
    memory = memory_rows(contenders, evaluator.session, tokens, settings.prompt_lengths, settings.timing_repeats)
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    bundle = open_bundle(BUNDLE, 1)
    return {
        "drafters": [drafter_document(one, outcomes[one.name], tasks, params) for one in contenders],
        "plain_seconds": plain_seconds(outcomes[MTP]),
        "modelled_by": params.drafting.model_dump(include={"pass_cost", "step_cost"}),
        "load_average_before_timing": load,
        "memory": memory,
        "memory_saved": memory_saved(memory, MTP, GENERIC),
        "head_in_bundle": asdict(look_at_addresses(bundle, prompts[0].prompt_ids, params.train.draft_length))
        | {"bundle_sha256": bundle.sha256},
    }


def run_comparison() -> None:
    """Write comparison.json.

    Raises:
        UserError: what it compares is not there yet.
    """
    set_quiet_environment()
    params = load_params()
    for needed in (ANSWERS, FEATURES, HEAD, TRAINING_REPORT, POLICY, BUNDLE):
        if not needed.exists():
            raise UserError("there is nothing to compare yet", f"no {needed}", "run `mtp repro`, then `mtp compare`")
    torch.use_deterministic_algorithms(True)
    settings, folder = params.compare, work_folder(params)
    prompts = first_of_each_task(read_prompts(PROMPTS), "test", settings.prompts_per_task)
    decode = Tokenizer.from_file(str(BACKBONE / "tokenizer.json")).decode
    rows = max(params.runtime.max_length, max(settings.prompt_lengths) + params.train.draft_length + 2)
    evaluator = LiveEvaluator(load_backbone(BACKBONE), prompts, read_templates(TEMPLATES), decode, rows)
    document = compare(params, evaluator, prompts, folder)
    created = host_card("torch", "transformers", "onnxruntime").as_dict()
    created |= {"threads": 1, "precision": "float32", "runtime": "torch", "draft_length": params.train.draft_length}
    write_json(COMPARISON_REPORT, {"created_with": created, **document})
    figures = {one["name"]: one[OVERALL]["extra_tokens_per_pass"] for one in document["drafters"]}
    print("compare: extra tokens per pass " + ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items()))
