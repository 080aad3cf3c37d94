"""`mtp throughput`: where the time of training and distillation goes on this machine, on the project's own data.

Owns what is put beside what. It refuses to measure distillation anew: its speed is in its own report, taken over the
whole run. Not a stage: its figures are about a machine and a moment, and nothing is decided by them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from components.core.errors import UserError
from components.core.files import read_json, write_json
from components.core.host import host_card, resolve_threads, set_quiet_environment
from components.core.params import Params, load_params
from components.core.paths import ANSWERS, BACKBONE, DISTILLATION_REPORT, FEATURES, THROUGHPUT_REPORT, WORK
from components.modeling.backbone import load_backbone
from components.modeling.batches import batch_order
from components.modeling.distillation_cost import capture_cost, distillation_cost
from components.modeling.packed import ATTENTION
from components.modeling.parallel_training import World
from components.modeling.throughput import matmul_peak, prepare, step_operators, step_parts
from components.modeling.training import Trainer, new_head
from pipelines.report import GAP, text_table
from pipelines.stages.train import load_training_sequences

STEPS, PASSES = 12, 10
Row = tuple[str, str, str, str, str]


def measure(params: Params, trainer: Trainer) -> dict[str, Any]:
    """All figures, as plain data for JSON; the trainer's head learns a little."""
    load = os.getloadavg()[0]
    peak = matmul_peak()
    order = batch_order(trainer.sequences, params.train.batch_sequences, params.train.seed, epoch=0)
    batches = order[: STEPS + 1]
    measured = read_json(DISTILLATION_REPORT, "run `mtp repro distil`")["throughput"]
    return {
        "load_average_before": load,
        "matmul_peak": asdict(peak),
        "training_step": [asdict(part) for part in step_parts(trainer, batches, peak)],
        "training_operators": [asdict(operator) for operator in step_operators(trainer, batches)],
        "distillation": asdict(distillation_cost(measured, trainer.backbone, peak)),
        "capture": asdict(capture_cost(trainer, params.distil.slots, PASSES)),
    }


def table(document: Mapping[str, Any]) -> list[str]:
    """Lines for people; every figure with its source."""
    made, peak = document["created_with"], document["matmul_peak"]
    source = f"products of {peak['size']} x {peak['size']}, median of {peak['repeats']}"
    rows: list[Row] = [
        ("float32 matmul peak", f"{peak['gflop_per_s']:.1f} GFLOP/s", GAP, "100%", source),
        *map(_part_row, document["training_step"]),
        *map(_operator_row, document["training_operators"]),
        *_distillation_rows(document["distillation"]),
        *_capture_rows(document["capture"]),
    ]
    machine = f"{made['cpu']}, {made['threads']} threads, {made['precision']}"
    return [
        *text_table(("what", "figure", "GFLOP", "of peak", "source"), rows),
        "",
        f"measured here: {machine}, load {document['load_average_before']:.1f} before ({THROUGHPUT_REPORT})",
        "distillation ran earlier: its share holds if the machine was as free then as it was now",
    ]


def _part_row(part: Mapping[str, Any]) -> Row:
    name, spent = f"training: {part['name']}", f"{part['median_ms']:.0f} ms"
    source = f"median of {part['steps']} steps"
    if not part["gflop"]:
        return name, spent, GAP, GAP, source
    return name, spent, f"{part['gflop']:.2f}", f"{part['share_of_peak']:.0%}", f"{source}, torch.utils.flop_counter"


def _operator_row(one: Mapping[str, Any]) -> Row:
    return one["name"], f"{one['self_cpu_ms']:.1f} ms", GAP, GAP, f"{one['share']:.1%} of a step, torch.profiler"


def _distillation_rows(cost: Mapping[str, Any]) -> list[Row]:
    report = f"{DISTILLATION_REPORT}, {cost['processes']} processes"
    answer, prompt = (f"{cost[key]:.3f}" for key in ("gflop_per_answer_token", "gflop_per_prompt_token"))
    rate, alone = f"{cost['answer_tokens_per_s']:.1f} tokens/s", f"{cost['answers_share_of_peak']:.0%}"
    return [
        ("distillation: answer tokens", rate, answer, alone, f"{report}; 2 x {cost['parameters']} parameters"),
        ("distillation: prompts too", GAP, prompt, f"{cost['share_of_peak']:.0%}", f"{report}; no output matrix"),
    ]


def _capture_rows(cost: Mapping[str, Any]) -> list[Row]:
    source = f"median of {cost['passes']} passes of {cost['slots']} slots"
    return [
        ("distillation: a pass", f"{cost['pass_ms']:.0f} ms", GAP, GAP, source),
        ("capture: states of a pass", f"{cost['keep_ms']:.3f} ms", GAP, GAP, source),
        ("capture: copy of an answer", f"{cost['answer_ms']:.3f} ms", GAP, GAP, source),
        ("capture: of decoding's time", f"{cost['share']:.2%}", GAP, GAP, source),
    ]


def run_throughput() -> None:
    """Measure, write throughput.json, print its table.

    Raises:
        UserError: there is no data to measure on.
    """
    set_quiet_environment()
    params = load_params()
    for needed in (BACKBONE, ANSWERS, FEATURES, DISTILLATION_REPORT):
        if not needed.exists():
            raise UserError("there is nothing to measure on yet", f"no {needed}", "run `mtp repro distil` first")
    threads = resolve_threads(params.runtime.threads)
    prepare(threads)
    backbone = load_backbone(BACKBONE, ATTENTION)
    sequences = load_training_sequences(pd.read_parquet(ANSWERS))
    head = new_head(params.head, backbone, sequences, params.train.seed).train()
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:  # no checkpoint is in it, and none is written
        document = measure(params, Trainer(head, backbone, sequences, params.train, Path(folder), World()))
    created = host_card("torch", "transformers").as_dict() | {"threads": threads, "precision": "float32"}
    document = {"created_with": created, **document}
    write_json(THROUGHPUT_REPORT, document)
    print("\n".join(table(document)))
