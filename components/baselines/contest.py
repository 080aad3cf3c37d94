"""All drafters on the same prompts, in the same loop, against the same plain answers.

Owns the contenders, and clocks around them. It refuses to compare drafters on different prompts: every contender
decodes a prompt before the next one is read. Its surprising decision: the first proposal of an answer is timed apart,
since a drafter with a cache of its own reads the whole prompt there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from components.baselines.assisted import AssistedGeneration
from components.data.table import Prompt
from components.decoding.loop import GREEDY, Drafter, Round, Rule
from components.decoding.outcomes import Outcome, judge
from components.decoding.tree import Tree
from components.modeling.live import LiveEvaluator


@dataclass(frozen=True)
class DraftTimes:
    """Time spent drafting one answer.

    Attributes:
        first_ms: the first proposal, with the drafter's pass over the prompt; None where that is not seen.
        first_drafts: drafts in it.
        step_ms: milliseconds per draft of each later proposal.
        total_ms: all proposals together.
        steps: times that the drafter's model ran; 0 for a drafter without one.
    """

    first_ms: float | None
    first_drafts: int
    step_ms: tuple[float, ...]
    total_ms: float
    steps: int


class Contestant(Protocol):
    """A way to answer a prompt with drafts."""

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[list[Round], DraftTimes]:
        """Answer one prompt."""


@dataclass(frozen=True)
class Contender:
    """A contestant and what is known of it before it runs.

    Attributes:
        name: row in the report.
        about: one line for people.
        contestant: answers prompts.
        draft_length: drafts in a chain at most; a tree has more.
        exact: whether it promises the plain text; relaxed acceptance does not.
        parameters: trained numbers.
        weights: tensors that must be resident beside the backbone's own.
        copied_rows: rows of the backbone's output matrix, copied so that they lie together.
        drafter: for measurements outside the loop; None where there is nothing new to measure there.
        training: what its training cost.
    """

    name: str
    about: str
    contestant: Contestant
    draft_length: int
    exact: bool = True
    parameters: int = 0
    weights: tuple[Tensor, ...] = ()
    copied_rows: tuple[Tensor, ...] = ()
    drafter: Drafter | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


class Stopwatch:
    """A drafter around another, with a clock.

    Args:
        drafter: does the work.
        steps: how often its model has run by now; None where it runs once for each draft.
    """

    def __init__(self, drafter: Drafter, steps: Callable[[], int] | None = None) -> None:
        self.drafter, self.steps = drafter, steps or self._drafts
        self.calls: list[tuple[float, int]] = []
        self.before = self.steps()

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int] | Tree:
        """The other's drafts."""
        started = time.perf_counter()
        drafts = self.drafter.propose(tokens, limit)
        self.calls.append((1e3 * (time.perf_counter() - started), len(drafts)))
        return drafts

    def times(self) -> DraftTimes:
        """What the calls so far took."""
        first, later = self.calls[:1], self.calls[1:]
        return DraftTimes(
            first_ms=first[0][0] if first else None,
            first_drafts=first[0][1] if first else 0,
            step_ms=tuple(spent / drafts for spent, drafts in later if drafts),
            total_ms=sum(spent for spent, _ in self.calls),
            steps=self.steps() - self.before,
        )

    def _drafts(self) -> int:
        return sum(drafts for _, drafts in self.calls)


class InLoop:
    """A drafter in the project's own loop.

    Args:
        evaluator: decodes prompts.
        drafter_of: the drafter for a task.
        rule: how tokens are chosen.
        steps: how often the drafters' model has run by now; None where it runs once for each draft.
    """

    def __init__(
        self,
        evaluator: LiveEvaluator,
        drafter_of: Callable[[str], Drafter],
        rule: Rule = GREEDY,
        steps: Callable[[], int] | None = None,
    ) -> None:
        self.evaluator, self.drafter_of, self.rule, self.steps = evaluator, drafter_of, rule, steps

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[list[Round], DraftTimes]:
        """Answer one prompt."""
        watch = Stopwatch(self.drafter_of(prompt.task), self.steps)
        _, rounds = self.evaluator.drafted(prompt, watch, draft_length, self.rule)
        return rounds, watch.times()


class InTransformers:
    """transformers' own loop."""

    def __init__(self, evaluator: LiveEvaluator, generation_of: Callable[[str], AssistedGeneration]) -> None:
        self.evaluator, self.generation_of = evaluator, generation_of

    def decode(self, prompt: Prompt, draft_length: int) -> tuple[list[Round], DraftTimes]:
        """Answer one prompt."""
        generation = self.generation_of(prompt.task)
        rule = self.evaluator.new_answer(prompt).rule
        _, rounds = generation.generate(prompt.prompt_ids, rule, draft_length)
        spent = [1e3 * one.seconds for one in generation.assistant_passes]
        first = spent[0] if spent else None
        return rounds, DraftTimes(first, min(len(spent), 1), tuple(spent[1:]), sum(spent), len(spent))


@dataclass(frozen=True)
class Timed:
    """One prompt, one contender.

    Attributes:
        widths: rows of each pass after the prompt's.
        departed: tokens that are not what the backbone would have chosen there.
        seconds: the whole answer by the clock, the pass over the prompt included.
        plain_seconds: the same without drafts, a moment before.
    """

    outcome: Outcome
    times: DraftTimes
    widths: tuple[int, ...]
    departed: int
    seconds: float
    plain_seconds: float


def run_contest(
    evaluator: LiveEvaluator, contenders: Sequence[Contender], prompts: Sequence[Prompt], done: Callable[[], None]
) -> dict[str, list[Timed]]:
    """Every contender on every prompt; outcomes by contender, in the order of ``prompts``."""
    outcomes: dict[str, list[Timed]] = {contender.name: [] for contender in contenders}
    for prompt in prompts:
        started = time.perf_counter()
        reference, margins = evaluator.plain(prompt)  # a margin takes a tenth of a millisecond
        plain_seconds = time.perf_counter() - started
        for contender in contenders:
            started = time.perf_counter()
            rounds, times = contender.contestant.decode(prompt, contender.draft_length)
            seconds = time.perf_counter() - started
            judged = judge(prompt.prompt_id, prompt.task, prompt.prompt_ids, reference.tokens, margins, rounds)
            widths = tuple(1 + len(one.drafted) + one.aside for one in rounds[1:])
            departed = sum(one.departed for one in rounds)
            outcomes[contender.name].append(Timed(judged, times, widths, departed, seconds, plain_seconds))
        done()
    return outcomes
