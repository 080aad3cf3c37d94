"""A recipe study: heads trained alike but for one thing, judged on the same answers, which none of them saw.

Owns the variants, the held-out answers, the capture of layers that the data set does not hold, and the judge. It
refuses a variant that changes anything but the head, its training or the share of the data. Its surprising decision:
shares are nested and held-out answers chosen by hash, so two variants always differ by the named change alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from components.core.config import Head, Positive, Strict, Train
from components.core.errors import UserError
from components.core.manifest import DraftPolicy, TaskPrompt
from components.decoding.bootstrap import Bootstrap
from components.decoding.outcomes import Outcome, judge, summary_rows
from components.modeling.backbone import Backbone
from components.modeling.calibration import record, replay_answer
from components.modeling.features import Sequence as Captured
from components.modeling.head import MTPHead
from components.modeling.parallel_training import World
from components.modeling.session import TorchBackbone, cached_rows
from components.modeling.training import JUDGE, Trainer, new_head

SECTIONS = ("head", "train")


class StudyPlan(Strict):
    """A study file."""

    held_out_per_task: Positive = Field(description="training answers that no variant trains on: the judges")
    draft_length: Annotated[int, Field(ge=1, le=7)] = Field(description="K of the judge, the same for all")
    base: dict[str, Any] = Field(description="what all variants share beyond params.yaml, by dotted key, or `share`")
    variants: dict[str, dict[str, Any]] = Field(min_length=1, description="what each changes, likewise")


@dataclass(frozen=True)
class Variant:
    """One head to be trained.

    Attributes:
        share: of the training answers, 0..1; smaller shares are part of larger ones.
        changes: what makes it differ from the base.
    """

    name: str
    share: float
    head: Head
    train: Train
    changes: Mapping[str, Any]


def make_variants(plan: StudyPlan, head: Head, train: Train) -> list[Variant]:
    """Settings of every variant, in the file's order.

    Raises:
        UserError: an unknown key or a wrong value.
    """
    return [_variant(name, changes, plan.base, head, train) for name, changes in plan.variants.items()]


def _variant(name: str, changes: Mapping[str, Any], base: Mapping[str, Any], head: Head, train: Train) -> Variant:
    settings = {"head": head.model_dump(), "train": train.model_dump()}
    wanted = {**base, **changes}
    share = wanted.pop("share", 1.0)
    for key, value in wanted.items():
        section, _, field = key.partition(".")
        if section not in SECTIONS or not field:
            raise UserError(f"variant {name}: unknown key {key}", "known: share, head.*, train.*", "correct the study")
        settings[section][field] = value
    try:
        return Variant(
            name, float(share), Head.model_validate(settings["head"]), Train.model_validate(settings["train"]), changes
        )
    except (ValidationError, ValueError) as error:
        raise UserError(f"variant {name} is not valid", str(error)[:200], "correct the study") from None


def _rank(sequence: Captured) -> str:
    return hashlib.sha256(f"study:{sequence.prompt_id}".encode()).hexdigest()


def split_answers(
    by_task: Mapping[str, Sequence[Captured]], held_out: int, largest_share: float
) -> tuple[dict[str, list[Captured]], dict[str, list[Captured]]]:
    """Answers to train on and answers to judge by, by task, each ordered by hash.

    Args:
        by_task: all training answers.
        held_out: judges of each task.
        largest_share: no variant trains on more.
    """
    training, judges = {}, {}
    for task, sequences in by_task.items():
        ordered = sorted(sequences, key=_rank)
        judges[task] = ordered[:held_out]
        training[task] = first_share(ordered[held_out:], largest_share)
    return training, judges


def first_share(sequences: Sequence[Captured], share: float) -> list[Captured]:
    """The first ``share`` of them."""
    return list(sequences[: round(share * len(sequences))])


@torch.inference_mode()
def capture_layers(backbone: Backbone, sequence: Captured, layers: Sequence[int]) -> Captured:
    """The same answer with the keys and values of other layers, from a pass over prompt and answer."""
    tokens = [*sequence.prompt, *sequence.answer][:-1]
    session = TorchBackbone(backbone, len(tokens) + 1)
    session.prefill(tokens)
    rows = [torch.cat(cached_rows(session.cache, layer)) for layer in layers]
    return replace(sequence, keys_values=torch.stack(rows))


def reading(sequence: Captured, layers: Sequence[int], wanted: Sequence[int]) -> Captured:
    """A view of ``sequence``, which holds ``layers``, for a head that reads ``wanted``."""
    if tuple(layers) == tuple(wanted):
        return sequence
    places = torch.tensor([list(layers).index(layer) for layer in wanted])
    chosen: Tensor = sequence.keys_values[places]
    return replace(sequence, keys_values=chosen)


class Judge:
    """Free-running drafts of a head on held-out answers, through the real loop.

    The answers are greedy and were recorded, so replaying them accepts what live decoding would, near-ties aside; the
    backbone need not run again. Reports of releases hold live figures only.

    Args:
        backbone: gives embeddings and output rows.
        judges: held-out answers by task, with the layers they hold.
        tasks: stop rules.
        decode: token ids to text.
        draft_length: K.
        bootstrap: intervals over answers.
    """

    def __init__(
        self,
        backbone: Backbone,
        judges: Mapping[str, Sequence[Captured]],
        layers: Sequence[int],
        tasks: Mapping[str, TaskPrompt],
        decode: Callable[[Sequence[int]], str],
        draft_length: int,
        bootstrap: Bootstrap,
    ) -> None:
        self.backbone, self.judges, self.layers, self.tasks = backbone, judges, tuple(layers), tasks
        self.decode, self.bootstrap = decode, bootstrap
        self.policy = DraftPolicy(longest=draft_length, stop_below=0.0, lookup_ngram=0)

    def rows(self, head: MTPHead) -> dict[str, Any]:
        """Rows per task and overall, as in the reports."""
        tasks, overall = summary_rows(list(self._outcomes(head)), self.bootstrap)
        return {"tasks": tasks, "overall": overall}

    def _outcomes(self, head: MTPHead) -> Iterator[Outcome]:
        for task, sequences in self.judges.items():
            for sequence in sequences:
                seen = reading(sequence, self.layers, head.config.kv_layers)
                trace = record(head, self.backbone, seen, task, self.policy.longest)
                eos_ids = self.backbone.card.eos_ids
                _, rounds = replay_answer(trace, self.policy, self.tasks[task], eos_ids, self.decode)
                margins = [0.0] * len(trace.answer)
                yield judge(sequence.prompt_id, task, trace.prompt, trace.answer, margins, rounds)


def train_variant(
    variant: Variant, training: Mapping[str, Sequence[Captured]], layers: Sequence[int], judge_: Judge, folder: Path
) -> dict[str, Any]:
    """Train one head and judge it; plain data for JSON.

    Args:
        training: answers by task, holding ``layers``.
        folder: keeps checkpoints, so that a killed study goes on.
    """
    started, wanted = time.perf_counter(), variant.head.kv_layers
    sequences = [reading(one, layers, wanted) for task in sorted(training) for one in training[task]]
    head = new_head(variant.head, judge_.backbone, sequences, variant.train.seed)
    # Nothing is chosen by validation: every variant trains its whole schedule, and its last epoch is judged.
    settings = variant.train.model_copy(update={"patience": variant.train.epochs, "processes": 1})
    trainer = Trainer(head, judge_.backbone, sequences, settings, folder, World())
    result = trainer.run(lambda _: {JUDGE: 0.0}, lambda *_: None)
    trained_s = time.perf_counter() - started
    return {
        "name": variant.name,
        "changes": dict(variant.changes),
        "sequences": len(sequences),
        "trained_tokens": result.supervised_positions[0],
        "steps": result.steps,
        "training_s": trained_s,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        **judge_.rows(head.eval()),
    }
