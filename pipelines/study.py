"""`mtp study FILE`: train the variants of a study file one after the other, and write what each is worth.

Owns the files: features of further layers, checkpoints and models/reports/study.json, which gains a row with every
finished variant. It refuses to mix rows made from other data. Its surprising decision: a finished variant
is never trained again, so a study grows by adding lines to its file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from tokenizers import Tokenizer

from components.core.errors import UserError
from components.core.files import atomic_folder, read_json, sha256_file, write_json
from components.core.host import host_card, resolve_threads, set_quiet_environment
from components.core.params import load_params
from components.core.paths import ANSWERS, BACKBONE, STUDY_REPORT, TEMPLATES, WORK
from components.core.progress import Progress
from components.data.table import read_templates
from components.decoding.bootstrap import Bootstrap
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.features import Sequence, read_shards, write_shard
from components.modeling.study import (
    Judge,
    StudyPlan,
    Variant,
    capture_layers,
    first_share,
    make_variants,
    split_answers,
    train_variant,
)
from pipelines.compare import training_sequences
from pipelines.report import text_table

SHARD_SEQUENCES = 100
ByTask = dict[str, list[Sequence]]


def read_plan(path: Path) -> StudyPlan:
    """Read and validate a study file.

    Raises:
        UserError: missing, not YAML, or not as described.
    """
    try:
        return StudyPlan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read", str(error)[:120], "name a study file, as docs/study.yaml") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{path} is not a study", str(error).replace("\n", " ")[:200], "see docs/study.yaml") from None


def with_layers(backbone: Backbone, by_task: ByTask, layers: tuple[int, ...], folder: Path) -> ByTask:
    """The same answers holding ``layers``; captured once, then read from ``folder``."""
    if not folder.exists():
        everything = [sequence for task in sorted(by_task) for sequence in by_task[task]]
        progress = Progress("capture", len(everything), "answers")
        with atomic_folder(folder) as temporary:
            for number in range(0, len(everything), SHARD_SEQUENCES):
                part = everything[number : number + SHARD_SEQUENCES]
                write_shard(temporary, number, [capture_layers(backbone, sequence, layers) for sequence in part])
                progress.advance(len(part))
    captured = {sequence.prompt_id: sequence for sequence in read_shards(folder)}
    return {task: [captured[sequence.prompt_id] for sequence in sequences] for task, sequences in by_task.items()}


def key_of(*parts: Any) -> str:
    """Short name of anything JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def finished_rows(key: str) -> dict[str, dict[str, Any]]:
    """Rows by the key of their variant, from an earlier run of the same study."""
    if not STUDY_REPORT.is_file():
        return {}
    document = read_json(STUDY_REPORT, f"remove {STUDY_REPORT}")
    return {row["key"]: row for row in document["rows"]} if document.get("key") == key else {}


def run_variants(
    plan: StudyPlan, variants: list[Variant], key: str, train: Callable[[Variant, Path], dict[str, Any]], threads: int
) -> list[dict[str, Any]]:
    """Train what is not finished yet; the report holds every finished row at any time."""
    rows = finished_rows(key)
    created = host_card("torch").as_dict() | {"threads": threads, "precision": "float32", "source": "replay"}
    for variant in variants:
        own = key_of(variant.head.model_dump(), variant.train.model_dump(), variant.share)
        folder = WORK / f"study-{key}-{own}"
        if own not in rows:
            print(f"study: {variant.name} {dict(variant.changes)}", flush=True)
            rows[own] = {"key": own, **train(variant, folder)}
            about = {"held_out_per_task": plan.held_out_per_task, "draft_length": plan.draft_length, "base": plan.base}
            write_json(STUDY_REPORT, {"created_with": created, "key": key, **about, "rows": list(rows.values())})
            shutil.rmtree(folder, ignore_errors=True)
    return list(rows.values())


def study_table(rows: Rows[Mapping[str, Any]]) -> list[str]:
    """Rows for people: extra tokens per pass by task, overall with its interval."""
    tasks = [row["task"] for row in rows[0]["tasks"]]
    lines = []
    for row in rows:
        low, high = row["overall"]["extra_tokens_per_pass_interval"]
        lines.append(
            (
                row["name"],
                str(row["trained_tokens"]),
                f"{row['parameters'] / 1e6:.1f}",
                f"{row['training_s']:.0f}",
                *(f"{one['extra_tokens_per_pass']:.2f}" for one in row["tasks"]),
                f"{row['overall']['extra_tokens_per_pass']:.2f} [{low:.2f}, {high:.2f}]",
                " ".join(f"{share:.2f}" for share in row["overall"]["conditional_acceptance"]),
            )
        )
    return text_table(("variant", "tokens", "M params", "s", *tasks, "all [95 %]", "accepted at depth"), lines)


def run_study(path: Path) -> None:
    """Bring study.json up to date with a study file, and print it.

    Raises:
        UserError: the file is wrong, or there is no distilled data.
    """
    set_quiet_environment()
    params, plan = load_params(), read_plan(path)
    variants = make_variants(plan, params.head, params.train)
    by_task = training_sequences()
    largest = max(variant.share for variant in variants)
    training, judges = split_answers(by_task, plan.held_out_per_task, largest)
    threads = resolve_threads(params.runtime.threads)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    backbone = load_backbone(BACKBONE)
    data = [sha256_file(ANSWERS), sha256_file(BACKBONE / "source.json")]
    layers = params.head.kv_layers
    wanted = {layer for variant in variants for layer in variant.head.kv_layers}
    if not wanted <= set(layers):
        layers = tuple(sorted(wanted))
        folder = WORK / f"study-features-{key_of(data, layers, len(judges), sorted(map(len, training.values())))}"
        both = {task: judges[task] + training[task] for task in training}
        held = with_layers(backbone, both, layers, folder)
        judges = {task: held[task][: len(judges[task])] for task in held}
        training = {task: held[task][len(judges[task]) :] for task in held}
    decode = partial(Tokenizer.from_file(str(BACKBONE / "tokenizer.json")).decode, skip_special_tokens=True)
    bootstrap = Bootstrap(params.evaluate.bootstrap_samples, params.evaluate.seed)
    judge = Judge(backbone, judges, layers, read_templates(TEMPLATES), decode, plan.draft_length, bootstrap)
    key = key_of(data, plan.held_out_per_task, plan.draft_length)

    def train(variant: Variant, work: Path) -> dict[str, Any]:
        part = {task: first_share(sequences, variant.share / largest) for task, sequences in training.items()}
        return train_variant(variant, part, layers, judge, work)

    rows = run_variants(plan, variants, key, train, threads)
    print("\n".join(study_table(rows)))
