"""Stage `train`: train the head on distilled answers; weights of the backbone are hashed before and after."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer

from components.core.config import Strict
from components.core.errors import UserError, exits_cleanly
from components.core.files import sha256_file, write_json
from components.core.host import host_card, resolve_threads
from components.core.paths import ANSWERS, BACKBONE, FEATURES, HEAD, PROMPTS, TEMPLATES, TRAINING_REPORT, WORK
from components.data.table import read_prompts, read_templates
from components.modeling import batches, checkpoint, head, losses, parallel_training, schedule, training
from components.modeling.answers import training_prompts
from components.modeling.backbone import Backbone, hash_weights, load_backbone
from components.modeling.features import Sequence, read_shards
from components.modeling.live import LiveEvaluator
from components.modeling.parallel_training import World, run_together
from components.modeling.training import Trainer, TrainingResult, new_head
from components.release.tracking import TrackingRun
from pipelines.stages.common import stage_params

RUN_FILE = "mlflow_run.json"


TRAINING_CODE = (batches, checkpoint, head, losses, parallel_training, schedule, training)


def work_folder(shape: Strict, train: Strict) -> Path:
    """Folder of this run's checkpoints; its name changes with everything that a run must not be resumed across."""
    files = [ANSWERS, BACKBONE / "source.json", *(Path(str(module.__file__)) for module in TRAINING_CODE)]
    parts = [[sha256_file(file) for file in files], shape.model_dump(), train.model_dump(), torch.__version__]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return WORK / f"train-{key}"


def load_training_sequences(answers: pd.DataFrame) -> list[Sequence]:
    """Captured sequences that train the head.

    Raises:
        UserError: every answer was filtered out.
    """
    wanted = training_prompts(answers)
    sequences = [sequence for sequence in read_shards(FEATURES) if sequence.prompt_id in wanted]
    if not sequences:
        raise UserError(
            "no answer is fit for training", f"{len(answers)} answers, all filtered", "check data/distilled"
        )
    return sequences


def start_tracking(params: Any, folder: Path) -> TrackingRun:
    """Open this run in MLflow, or the one that a killed run of the same work left behind."""
    file = folder / RUN_FILE
    known = json.loads(file.read_text())["run_id"] if file.exists() else None
    flat = {
        f"{section}.{k}": v for section in ("head", "train") for k, v in getattr(params, section).model_dump().items()
    }
    run = TrackingRun.start_or_resume(params.registry, "train", flat, {"stage": "train", "work": folder.name}, known)
    write_json(file, {"run_id": run.run_id})
    return run


def training_report(
    answers: pd.DataFrame,
    sequences: list[Sequence],
    hashes: tuple[str, str],
    result: TrainingResult,
    made_by: dict[str, Any],
) -> dict[str, Any]:
    """The evidence that training leaves behind."""
    of_prompts = sum(len(sequence.prompt) for sequence in sequences)
    of_answers = sum(len(sequence.answer) for sequence in sequences)
    return {
        "created_with": host_card("torch", "transformers", "mlflow").as_dict() | made_by,
        "backbone_sha256_before": hashes[0],
        "backbone_sha256_after": hashes[1],
        "sequences": len(sequences),
        "filtered_sequences": int((answers["split"] == "train").sum()) - len(sequences),
        "trained_tokens": result.supervised_positions[0],
        "trained_share": result.supervised_positions[0] / (of_prompts + of_answers),
        "supervised_positions": result.supervised_positions,
        "out_of_vocabulary_positions": result.out_of_vocabulary_positions,
        "steps": result.steps,
        "best_epoch": result.best_epoch,
        "stopped_early": result.stopped_early,
        "skipped_batches": result.skipped_batches,
        "last_batch_losses": result.last_batch_losses,
        "validation": result.validation,
    }


def make_evaluator(backbone: Backbone, params: Any) -> LiveEvaluator:
    """Live decoding of the first validation prompts of each task."""
    prompts = [prompt for prompt in read_prompts(PROMPTS) if prompt.split == "validation"]
    decode = Tokenizer.from_file(str(BACKBONE / "tokenizer.json")).decode
    return LiveEvaluator(backbone, prompts, read_templates(TEMPLATES), decode, params.runtime.max_length)


def train(params: Any, world: World) -> None:
    """Take part in the training; the process that leads writes models/head and training.json."""
    threads = max(1, resolve_threads(params.runtime.threads) // world.size)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    backbone = load_backbone(BACKBONE)
    answers = pd.read_parquet(ANSWERS)
    sequences = load_training_sequences(answers)
    folder = work_folder(params.head, params.train)
    folder.mkdir(parents=True, exist_ok=True)
    head = new_head(params.head, backbone, sequences, params.train.seed)
    trainer = Trainer(head, backbone, sequences, params.train, folder, world)
    if not world.leads:
        trainer.run(_not_here, _not_here)
        return
    before = hash_weights(backbone.model)
    evaluator = make_evaluator(backbone, params)
    limit, length = params.train.validate_prompts_per_task, params.train.draft_length
    with start_tracking(params, folder) as run:
        result = trainer.run(lambda trained: evaluator.acceptance(trained, length, limit), run.log)
        made_by = {"threads": threads, "processes": world.size, "precision": "float32", "mlflow_run_id": run.run_id}
        report = training_report(answers, sequences, (before, hash_weights(backbone.model)), result, made_by)
        head.save_pretrained(HEAD)
        write_json(TRAINING_REPORT, report)
        run.finish()
    shutil.rmtree(folder, ignore_errors=True)
    print(
        f"train: {report['trained_tokens']} supervised tokens ({report['trained_share']:.0%} of all), "
        f"{result.steps} steps, epoch {result.best_epoch} of {len(result.validation)} kept"
        f"{', stopped early' if result.stopped_early else ''}"
    )


def _not_here(*_: Any) -> Any:
    raise RuntimeError("only the process that leads validates and logs")


def train_together(world: World) -> None:
    """What each of several processes runs."""
    train(stage_params("train"), world)


@exits_cleanly
def main() -> None:
    """Train in this process, or in as many as `train.processes` says."""
    params = stage_params("train")
    if params.train.processes == 1:
        train(params, World())
    else:
        run_together(train_together, params.train.processes)


if __name__ == "__main__":
    main()
