"""Which policy pays: drafts of the head recorded at every position of the validation answers, then replayed.

Owns the recording, the replay through the real draft-verify loop, and the choice by the cost model
(tau / (v + K d), in units of one decode pass). A replay is a calibration, never an acceptance figure of a report: those
are decoded live. Its surprising decision: a trace holds the longest draft from *every* position, so any number of
policies can be compared without running a model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from components.core.config import Drafting
from components.core.errors import UserError
from components.core.manifest import DraftPolicy, TaskPrompt
from components.decoding.drafting import PolicyDrafter
from components.decoding.loop import Round, decode_with_drafts
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone
from components.modeling.batches import collate, make_vocabulary
from components.modeling.features import Sequence as CapturedSequence
from components.modeling.head import MTPHead, rotary_angles

HEAD, HYBRID, MOST_TOKENS = "head", "hybrid", "most_tokens"


@dataclass(frozen=True)
class Trace:
    """One greedy answer and what the head would draft at each of its positions.

    Attributes:
        task: name of the task.
        prompt, answer: token ids.
        drafts: token ids, [len(answer) - 1][longest]; row i drafts what follows answer[i].
        probabilities: of each draft within the draft vocabulary, same shape.
    """

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    probabilities: tuple[tuple[float, ...], ...]


@torch.inference_mode()
def record(head: MTPHead, backbone: Backbone, sequence: CapturedSequence, task: str, longest: int) -> Trace:
    """Draft ``longest`` tokens from every position of a captured answer."""
    vocabulary = make_vocabulary(head.config.draft_to_target, backbone.card.vocab_size)
    batch = collate([sequence], longest, vocabulary)
    draft_rows = backbone.output_rows[vocabulary.draft_to_target]
    angles = rotary_angles(batch.positions, head.config.head_dim, head.config.rope_theta)
    tokens, state, drafts, probabilities = batch.inputs[..., 0], batch.hidden, [], []
    for _ in range(longest):
        state = head(backbone.embed(tokens), state, batch.keys_values, batch.mask, *angles)
        best = (state @ draft_rows.T).softmax(dim=-1).max(dim=-1)
        tokens = vocabulary.draft_to_target[best.indices]
        drafts.append(tokens[0])
        probabilities.append(best.values[0])
    anchors = len(sequence.answer) - 1
    rows = torch.stack(drafts, dim=1)[:anchors].tolist(), torch.stack(probabilities, dim=1)[:anchors].tolist()
    return Trace(task, sequence.prompt, sequence.answer, *(tuple(map(tuple, part)) for part in rows))


class Replay:
    """Both sides of the loop, played from a trace, which holds choices and no logits.

    Attributes:
        steps: of the head.
        widths: rows of each pass.
    """

    last_logits = ()

    def __init__(self, trace: Trace) -> None:
        self.trace, self.length, self.max_length = trace, 0, 1 << 30
        self.steps = 0
        self.widths: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> int:
        """The answer's first token."""
        self.length = len(tokens)
        return self.trace.answer[0]

    rewind = prefill

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """What the answer goes on with."""
        self.widths.append(len(tokens))
        first = self.length - len(self.trace.prompt) + 1
        truth = list(self.trace.answer[first : first + len(tokens)])
        return truth + [-1] * (len(tokens) - len(truth))  # behind the end nothing is accepted

    def keep(self, rows: int) -> None:
        """Move on."""
        self.length += rows

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        """The recorded drafts of this position."""
        anchor = self.length - len(self.trace.prompt)
        for draft in zip(self.trace.drafts[anchor], self.trace.probabilities[anchor], strict=True):
            self.steps += 1
            yield draft


@dataclass(frozen=True)
class Score:
    """What a policy costs on the recorded answers of one task.

    Attributes:
        tokens_per_pass: tau by replay.
        steps_per_pass: head steps in a round, mean.
        speedup: by the cost model, against one token a pass.
    """

    tokens_per_pass: float
    steps_per_pass: float
    speedup: float


def replay_answer(
    trace: Trace,
    policy: DraftPolicy,
    task: TaskPrompt,
    eos_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
) -> tuple[Replay, list[Round]]:
    """One answer through the real loop under one policy; the player that counted passes and steps, and the rounds."""
    player = Replay(trace)
    answer = Answer(StopRule(frozenset(eos_ids), tuple(task.stop_texts), task.max_new_tokens), decode)
    drafter = PolicyDrafter(player, policy, eos_ids)
    return player, list(decode_with_drafts(player, drafter, trace.prompt, answer, policy.longest))


def replay(
    traces: Sequence[Trace],
    policy: DraftPolicy,
    tasks: Mapping[str, TaskPrompt],
    eos_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    costs: Drafting,
) -> Score:
    """Replay all traces under one policy."""
    passes = tokens = steps = 0
    seconds = 0.0
    for trace in traces:
        player, rounds = replay_answer(trace, policy, tasks[trace.task], eos_ids, decode)
        passes += len(player.widths)
        tokens += sum(len(one.emitted) for one in rounds) - 1
        steps += player.steps
        seconds += sum(costs.pass_cost[width - 1] for width in player.widths) + player.steps * costs.step_cost
    if not passes:
        return Score(0.0, 0.0, 0.0)
    return Score(tokens / passes, steps / passes, tokens / seconds)


def candidates(settings: Drafting) -> list[DraftPolicy]:
    """Fixed lengths first, then every threshold with and without lookup at the full length."""
    fixed = [DraftPolicy(longest=k, stop_below=0.0, lookup_ngram=0) for k in range(1, settings.longest)]
    return fixed + [
        DraftPolicy(longest=settings.longest, stop_below=threshold, lookup_ngram=ngram)
        for ngram in (0, *settings.lookup_ngrams)
        for threshold in settings.thresholds
    ]


def calibrate(score: Callable[[str, DraftPolicy], Score], tasks: Sequence[str], settings: Drafting) -> dict[str, Any]:
    """Score every candidate on every task, and choose for the head alone, with lookup, and for tokens per pass alone.

    Args:
        score: replays one task under one policy.
        tasks: names of the tasks.
        settings: candidates and costs.

    Returns:
        ``policies`` by mode with the ``default`` one, and the ``curve`` of all candidates; the judge is the mean over
        tasks of the cost model's speed-up, so that no task pays for another's longer answers.

    Raises:
        UserError: there is no task.
    """
    if not tasks:
        raise UserError("nothing to calibrate on", "0 recorded answers", "check data/distilled")
    curve = []
    for policy in candidates(settings):
        scores = {task: score(task, policy) for task in tasks}
        mean = sum(one.speedup for one in scores.values()) / len(scores)
        curve.append((policy, mean, scores))
    best = {
        HEAD: max((row for row in curve if row[0].lookup_ngram == 0), key=lambda row: row[1]),
        HYBRID: max((row for row in curve if row[0].lookup_ngram > 0), key=lambda row: row[1]),
        # Where a pass costs the same at any width and a draft nothing, this would be the fastest.
        MOST_TOKENS: max(curve, key=lambda row: (sum(one.tokens_per_pass for one in row[2].values()), row[1])),
    }
    return {
        "policies": {
            "modes": {mode: row[0].model_dump() for mode, row in best.items()},
            "default": max((HEAD, HYBRID), key=lambda mode: best[mode][1]),
        },
        "curve": [
            {**policy.model_dump(), "speedup": mean, "tasks": {task: asdict(one) for task, one in scores.items()}}
            for policy, mean, scores in curve
        ],
    }
