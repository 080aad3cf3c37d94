"""How far a round drafts, and how that is chosen: no model, only the policy, the replay and the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from components.core.config import Drafting
from components.core.errors import UserError
from components.core.manifest import DraftPolicy, TaskPrompt
from components.decoding.drafting import PolicyDrafter
from components.modeling.calibration import Score, Trace, calibrate, candidates, replay

EOS = 2
TASKS = {"t": TaskPrompt(rendered="", stop_texts=(), max_new_tokens=20)}
COSTS = Drafting(longest=3, thresholds=(0.0, 0.5), lookup_ngrams=(2,), pass_cost=(1.0, 1.1, 1.2, 1.3), step_cost=0.1)


class Scripted:
    """A head that drafts a script, with one probability a step."""

    def __init__(self, script: Sequence[int], probabilities: Sequence[float]) -> None:
        self.script, self.probabilities, self.steps = list(script), list(probabilities), 0

    def drafts(self, token: int) -> Iterator[tuple[int, float]]:
        self.steps = 0
        for draft in zip(self.script, self.probabilities, strict=True):
            self.steps += 1
            yield draft


def policy(longest: int = 3, stop_below: float = 0.0, lookup_ngram: int = 0) -> DraftPolicy:
    return DraftPolicy(longest=longest, stop_below=stop_below, lookup_ngram=lookup_ngram)


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_an_unsure_head_stops_with_the_draft_that_made_it_unsure() -> None:
    head = Scripted([7, 8, 9, 10], [0.9, 0.5, 0.9, 0.9])
    assert PolicyDrafter(head, policy(7, 0.5), ()).propose([1, 2], 4) == [7, 8]
    assert head.steps == 2, "nothing is computed behind the stop"
    assert PolicyDrafter(head, policy(7, 0.41), ()).propose([1, 2], 4) == [7, 8, 9]
    assert PolicyDrafter(head, policy(7, 0.0), ()).propose([1, 2], 3) == [7, 8, 9]


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    assert PolicyDrafter(Scripted([7, EOS, 9], [1.0] * 3), policy(), (EOS,)).propose([1], 3) == [7, EOS]
    copier = PolicyDrafter(Scripted([7], [1.0]), policy(7, lookup_ngram=2), (EOS,))
    assert copier.propose([4, 5, 11, EOS, 12, 4, 5], 7) == [11, EOS]


def test_words_that_occurred_before_are_copied_without_the_head() -> None:
    head = Scripted([7], [1.0])
    drafter = PolicyDrafter(head, policy(lookup_ngram=2), ())
    assert drafter.propose([4, 5, 6, 11, 12, 9, 5, 6], 3) == [11, 12, 9]
    assert head.steps == 0


def test_the_prompt_finishes_what_the_head_starts() -> None:
    head = Scripted([6, 13], [1.0, 1.0])
    drafter = PolicyDrafter(head, policy(lookup_ngram=2), ())
    assert drafter.propose([4, 5, 6, 11, 12, 9, 5], 3) == [6, 11, 12]
    assert head.steps == 1
    assert PolicyDrafter(head, policy(lookup_ngram=3), ()).propose([4, 5, 6, 11, 12, 9, 5], 2) == [6, 13]


def trace(wrong_at: int | None = None, probability: float = 0.9) -> Trace:
    """Answer 10..17 then EOS; the head is right but for one token."""
    answer = (*range(10, 18), EOS)
    padded = (*answer, 0, 0, 0)
    drafts = [tuple(99 if token == wrong_at else token for token in padded[i + 1 : i + 4]) for i in range(8)]
    return Trace("t", (1, 2, 3), answer, tuple(drafts), tuple((probability,) * 3 for _ in range(8)))


def score(one: Trace, chosen: DraftPolicy) -> Score:
    return replay([one], chosen, TASKS, (EOS,), decode, COSTS)


def test_replay_counts_passes_steps_and_costs() -> None:
    right = score(trace(), policy(3))
    assert right.tokens_per_pass == 4.0
    assert right.steps_per_pass == 3.0  # the last round drafts up to EOS: 3 + 3 steps in two rounds
    assert right.speedup == pytest.approx(8 / (2 * 1.3 + 6 * 0.1))
    assert score(trace(wrong_at=12), policy(3)).tokens_per_pass == pytest.approx(8 / 3)
    assert score(trace(), policy(1)).tokens_per_pass == 2.0


def test_replay_of_an_unsure_head_computes_less() -> None:
    unsure = score(trace(probability=0.3), policy(3, stop_below=0.5))
    assert (unsure.tokens_per_pass, unsure.steps_per_pass) == (2.0, 1.0)


def test_candidates_hold_fixed_lengths_and_thresholds_with_and_without_lookup() -> None:
    found = [(one.longest, one.stop_below, one.lookup_ngram) for one in candidates(COSTS)]
    assert found == [(1, 0.0, 0), (2, 0.0, 0), (3, 0.0, 0), (3, 0.5, 0), (3, 0.0, 2), (3, 0.5, 2)]


def test_calibration_chooses_what_pays_in_each_mode_and_over_all() -> None:
    speeds = {(1, 0.0, 0): 1.1, (2, 0.0, 0): 1.4, (3, 0.5, 0): 1.3, (3, 0.5, 2): 1.5}

    def known(task: str, one: DraftPolicy) -> Score:
        return Score(
            2.0 + one.longest + one.lookup_ngram, 1.0, speeds.get((one.longest, one.stop_below, one.lookup_ngram), 1.0)
        )

    chosen = calibrate(known, ["a", "b"], COSTS)
    assert chosen["policies"]["default"] == "hybrid"
    assert chosen["policies"]["modes"]["head"] == policy(2).model_dump()
    assert chosen["policies"]["modes"]["hybrid"] == policy(3, 0.5, 2).model_dump()
    assert chosen["policies"]["modes"]["most_tokens"] == policy(3, 0.5, 2).model_dump(), "the faster of two alike"
    assert len(chosen["curve"]) == 6
    with pytest.raises(UserError, match="nothing to calibrate on"):
        calibrate(known, [], COSTS)
