"""What distillation costs: in arithmetic, and what capturing for the head adds to decoding.

Owns both sums. It refuses to decode anew: the speed is that of the whole run, from its own report. Its surprising
decision: capture is timed by its copies, not by passes with and without them, whose difference drowns in their noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from components.modeling.backbone import Backbone
from components.modeling.packed import PackedPass, SlotRows
from components.modeling.throughput import GIGA, MatmulPeak, seconds_of
from components.modeling.training import Trainer


@dataclass(frozen=True)
class Capture:
    """What keeping states and rows for the head adds to decoding; medians.

    Attributes:
        pass_ms: a pass of one token for each slot, the copy of states included.
        keep_ms: that copy.
        answer_ms: copying out one finished answer, states and rows of the head's layers.
        slots: answers written at once.
        passes: samples.
        share: of the time of a decoded token that the two copies take.
    """

    pass_ms: float
    keep_ms: float
    answer_ms: float
    slots: int
    passes: int
    share: float


@dataclass(frozen=True)
class Distillation:
    """Distillation's speed in arithmetic, by the whole run's own figures.

    Attributes:
        answer_tokens_per_s: all processes together.
        gflop_per_answer_token: 2 x the backbone's parameters; attention, which grows with the rows, is left out.
        gflop_per_prompt_token: the same without the output matrix, which only a prompt's last token meets.
        answers_share_of_peak: by answer tokens alone.
        share_of_peak: the prompt tokens that were computed counted too.
        parameters: of the backbone, a tied embedding once.
        processes: of one thread each.
    """

    answer_tokens_per_s: float
    gflop_per_answer_token: float
    gflop_per_prompt_token: float
    answers_share_of_peak: float
    share_of_peak: float
    parameters: int
    processes: int


@torch.inference_mode()
def capture_cost(trainer: Trainer, slots: int, passes: int) -> Capture:
    """Time decoding passes over as many rows as real answers have, and what capture copies beside them.

    Args:
        trainer: its sequences give lengths and tokens; its backbone must be loaded for packed passes.
        slots: answers written at once.
        passes: to time.
    """
    backbone, sequences = trainer.backbone, trainer.sequences[:slots]
    layers, rows = trainer.head.config.kv_layers, [len(one.prompt) + len(one.answer) - 1 for one in sequences]
    held = SlotRows(backbone.card, len(sequences), max(rows) + passes + 1)
    states = torch.zeros(len(sequences), backbone.card.hidden_size)
    spent: dict[str, list[float]] = {"pass": [], "keep": [], "answer": []}
    for done in range(passes + 1):  # the first one warms up
        step = PackedPass([(slot, rows[slot] + done, one.answer[0]) for slot, one in enumerate(sequences)], ())
        slot = done % len(sequences)
        spent["pass"].append(seconds_of(held.run, backbone, step))
        spent["keep"].append(seconds_of(held.hidden.index_put_, (step.slots, step.rows), states))  # as `run` does
        spent["answer"].append(seconds_of(held.captured, slot, rows[slot], layers))
    whole, keep, out = (1e3 * statistics.median(times[1:]) for times in spent.values())
    # By the token: a pass writes one for each slot, an answer is copied out once in as many tokens as it has.
    copying = out / statistics.mean(len(one.answer) for one in sequences)
    share = (keep / len(sequences) + copying) / (whole / len(sequences) + copying)
    return Capture(whole, keep, out, len(sequences), passes, share)


def distillation_cost(measured: Mapping[str, Any], backbone: Backbone, peak: MatmulPeak) -> Distillation:
    """Distillation's own figures, turned into arithmetic.

    Args:
        measured: section `throughput` of distillation.json.
        backbone: the frozen model.
        peak: what shares are of; taken on as many threads as there were processes.
    """
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    of_answer, of_prompt = (2 * count / GIGA for count in (parameters, parameters - backbone.output_rows.numel()))
    answers = measured["answer_tokens"] * of_answer / measured["wall_s"]
    prompts = measured["computed_tokens"] * of_prompt / measured["wall_s"]
    return Distillation(
        answer_tokens_per_s=measured["answer_tokens_per_s"],
        gflop_per_answer_token=of_answer,
        gflop_per_prompt_token=of_prompt,
        answers_share_of_peak=answers / peak.gflop_per_s,
        share_of_peak=(answers + prompts) / peak.gflop_per_s,
        parameters=parameters,
        processes=measured["processes"],
    )
