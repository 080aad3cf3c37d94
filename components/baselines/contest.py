"""All drafters on the same prompts, in the same loop, against the same plain answers; and the rows of comparison.json.

Owns timing inside the loop and the figures of each drafter. It refuses to compare drafters on different prompts: every
contender decodes a prompt before the next one is read. Its surprising decision: the first proposal of an answer is
timed apart, since a drafter with a cache of its own reads the whole prompt there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from components.baselines.assisted import AssistedGeneration
from components.data.table import Prompt
from components.decoding.bootstrap import Bootstrap
from components.decoding.loop import Drafter, Round
from components.decoding.outcomes import Outcome, judge, summary_row
from components.decoding.stopping import Answer
from components.modeling.live import LiveEvaluator

OVERALL = "overall"


@dataclass(frozen=True)
class DraftTimes:
    """Time spent drafting one answer.

    Attributes:
        first_ms: the first proposal, with the drafter's pass over the prompt; None where that is not seen.
        first_drafts: drafts in it.
        step_ms: milliseconds per draft of each later proposal.
    """

    first_ms: float | None
    first_drafts: int
    step_ms: tuple[float, ...]


class Contestant(Protocol):
    """A way to answer a prompt with drafts."""

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[Answer, list[Round], DraftTimes]:
        """Answer one prompt."""


@dataclass(frozen=True)
class Contender:
    """A contestant and what is known of it before it runs.

    Attributes:
        name: row in the report.
        about: one line for people.
        contestant: answers prompts.
        parameters: trained numbers.
        weights: tensors that must be resident beside the backbone's own.
        copied_rows: rows of the backbone's output matrix, copied so that they lie together.
        drafter: for measurements outside the loop; None where transformers drafts.
        training: what its training cost.
    """

    name: str
    about: str
    contestant: Contestant
    parameters: int = 0
    weights: tuple[Tensor, ...] = ()
    copied_rows: tuple[Tensor, ...] = ()
    drafter: Drafter | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


class Stopwatch:
    """A drafter around another, with a clock."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.calls: list[tuple[float, int]] = []

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The other's drafts."""
        started = time.perf_counter()
        drafts = self.drafter.propose(tokens, limit)
        self.calls.append((1e3 * (time.perf_counter() - started), len(drafts)))
        return drafts

    def times(self) -> DraftTimes:
        """What the calls so far took."""
        if not self.calls:
            return DraftTimes(None, 0, ())
        first, *later = self.calls
        return DraftTimes(*first, tuple(spent / drafts for spent, drafts in later if drafts))


class InLoop:
    """A drafter in the project's own loop.

    Args:
        evaluator: decodes prompts.
        drafter_of: the drafter for a task.
    """

    def __init__(self, evaluator: LiveEvaluator, drafter_of: Callable[[str], Drafter]) -> None:
        self.evaluator, self.drafter_of = evaluator, drafter_of

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[Answer, list[Round], DraftTimes]:
        """Answer one prompt."""
        watch = Stopwatch(self.drafter_of(prompt.task))
        answer, rounds = self.evaluator.drafted(prompt, watch, draft_length)
        return answer, rounds, watch.times()


class InTransformers:
    """transformers' own loop."""

    def __init__(self, evaluator: LiveEvaluator, generation_of: Callable[[str], AssistedGeneration]) -> None:
        self.evaluator, self.generation_of = evaluator, generation_of

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[Answer, list[Round], DraftTimes]:
        """Answer one prompt."""
        generation = self.generation_of(prompt.task)
        rule = self.evaluator.new_answer(prompt).rule
        answer, rounds = generation.generate(prompt.prompt_ids, rule, draft_length)
        spent = [1e3 * one.seconds for one in generation.assistant_passes]
        return answer, rounds, DraftTimes(spent[0] if spent else None, min(len(spent), 1), tuple(spent[1:]))


@dataclass(frozen=True)
class Timed:
    """One prompt, one contender."""

    outcome: Outcome
    times: DraftTimes


def run_contest(
    evaluator: LiveEvaluator,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    draft_length: int,
    done: Callable[[], None],
) -> dict[str, list[Timed]]:
    """Every contender on every prompt; outcomes by contender, in the order of ``prompts``."""
    outcomes: dict[str, list[Timed]] = {contender.name: [] for contender in contenders}
    for prompt in prompts:
        reference, margins = evaluator.plain(prompt)
        for contender in contenders:
            _, rounds, times = contender.contestant.decode(prompt, draft_length)
            judged = judge(prompt.prompt_id, prompt.task, prompt.prompt_ids, reference.tokens, margins, rounds)
            outcomes[contender.name].append(Timed(judged, times))
        done()
    return outcomes


def comparison_row(task: str, timed: Sequence[Timed], bootstrap: Bootstrap) -> dict[str, Any]:
    """Figures of one drafter on one task."""
    row = {"task": task, **summary_row([one.outcome for one in timed], bootstrap)}
    times = [one.times for one in timed]
    step = _median([ms for one in times for ms in one.step_ms])
    firsts = [one.first_ms - one.first_drafts * (step["median"] or 0.0) for one in times if one.first_ms is not None]
    return row | {
        "draft_ms_per_step": step,
        "prompt_pass_ms": _median([max(ms, 0.0) for ms in firsts]),
    }


def _median(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values) if values else None, "samples": len(values)}


def drafter_rows(timed: Sequence[Timed], tasks: Sequence[str], bootstrap: Bootstrap) -> dict[str, Any]:
    """One drafter's rows: each task, then all together."""
    parts = {task: [one for one in timed if one.outcome.task == task] for task in tasks}
    rows = [comparison_row(task, part, bootstrap) for task, part in parts.items() if part]
    return {"tasks": rows, OVERALL: comparison_row(OVERALL, timed, bootstrap)}
