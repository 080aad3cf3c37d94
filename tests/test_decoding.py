"""The draft-verify loop equals plain greedy decoding, to the token, whatever the drafter says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import UserError
from components.decoding.comparison import check_wiring, find_mismatch
from components.decoding.lookup import PromptLookup
from components.decoding.loop import GREEDY, Round, Rule, decode_greedy, decode_with_drafts
from components.decoding.metrics import (
    Acceptance,
    add_up,
    count_rounds,
    echo_rate,
    first_mismatch,
    is_looping,
)
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling
from components.decoding.stopping import Answer, StopRule

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token % 26] for token in tokens)


class ScriptedBackbone:
    """Always continues the script; refuses to read rows that were never kept."""

    def __init__(self, script: Sequence[int], max_length: int = 10_000) -> None:
        self.script, self.rows, self.tentative, self.prompt = list(script), 0, 0, 0
        self.max_length = max_length
        self.passes = 0
        self.last_logits = self.logits_of([self.script[0]])

    @property
    def length(self) -> int:
        return self.rows

    @staticmethod
    def logits_of(truth: Sequence[int]) -> np.ndarray:
        return np.eye(100, dtype=np.float32)[list(truth)]

    def prefill(self, tokens: Sequence[int]) -> int:
        self.rows = self.prompt = len(tokens)
        return self.script[0]

    rewind = prefill

    def verify(self, tokens: Sequence[int]) -> list[int]:
        assert self.tentative == 0, "the last pass was never settled with keep()"
        assert self.rows + len(tokens) <= self.max_length
        at = self.rows - self.prompt
        assert tokens[0] == self.script[at], "the newest token must be the backbone's own"
        self.tentative = len(tokens)
        self.passes += 1
        wrong = [-1] * len(tokens)
        truth, right = [], True
        for index, token in enumerate(tokens):
            right = right and token == self.script[at + index]
            truth.append(self.script[at + index + 1] if right else wrong[index])
        self.last_logits = self.logits_of(truth)
        return truth

    def keep(self, rows: int) -> None:
        assert 1 <= rows <= self.tentative
        self.rows, self.tentative = self.rows + rows, 0


class NoisyDrafter:
    """Right, except where the noise says otherwise."""

    def __init__(self, script: Sequence[int], noise: Sequence[bool], prompt: int) -> None:
        self.script, self.noise, self.prompt, self.calls = list(script), list(noise), prompt, 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        at = len(tokens) - self.prompt
        drafts = self.script[at : at + limit]
        self.calls += 1
        return [99 if self.noise[(at + i) % len(self.noise)] else token for i, token in enumerate(drafts)]


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.integers(0, 12), min_size=80, max_size=80),
    noise=st.lists(st.booleans(), min_size=1, max_size=9),
    draft_length=st.integers(1, 8),
    budget=st.integers(1, 60),
    eos=st.frozensets(st.integers(0, 12), max_size=3),
    stop=st.sampled_from(["", "ab", "c", "dda"]),
    room=st.integers(0, 70),
    exact=st.sampled_from([GREEDY, Sampling(temperature=0.0), Sampling(temperature=1e-3, top_p=0.9), Relaxed(1e-3)]),
)
def test_drafting_never_changes_the_tokens(
    script: list[int],
    noise: list[bool],
    draft_length: int,
    budget: int,
    eos: frozenset[int],
    stop: str,
    room: int,
    exact: Rule,
) -> None:
    rule = StopRule(eos, (stop,) if stop else (), budget)
    prompt = [1, 2, 3]
    reference, answer = Answer(rule, letters), Answer(rule, letters)
    list(decode_greedy(ScriptedBackbone(script), prompt, reference))
    backbone = ScriptedBackbone(script, max_length=len(prompt) + budget + room)
    drafter = NoisyDrafter(script, noise, len(prompt))
    rounds = list(decode_with_drafts(backbone, drafter, prompt, answer, draft_length, exact))
    assert answer.tokens == reference.tokens == script[: len(reference.tokens)]
    assert answer.stop_reason == reference.stop_reason
    assert answer.text() == reference.text()
    assert len(answer.tokens) <= budget
    assert sum(len(round_.emitted) for round_ in rounds) == len(answer.tokens)
    assert all(len(round_.drafted) <= draft_length for round_ in rounds)
    assert not any(round_.departed for round_ in rounds)


def test_a_right_drafter_emits_whole_rounds() -> None:
    script = list(range(1, 25))
    answer = Answer(StopRule(frozenset(), (), 13), letters)
    backbone = ScriptedBackbone(script)
    rounds = list(decode_with_drafts(backbone, NoisyDrafter(script, [False], 2), [0, 0], answer, 3))
    assert [len(round_.emitted) for round_ in rounds] == [1, 4, 4, 4]
    counts = count_rounds(rounds, 3)
    assert counts.acceptance_length == 4.0
    assert counts.conditional == [1.0, 1.0, 1.0]
    assert backbone.passes == 3


def test_stop_inside_an_accepted_run_ends_there() -> None:
    script = [5, 6, 7, 2, 9, 9, 9]
    answer = Answer(StopRule(frozenset({2, 8}), (), 50), letters)
    rounds = list(decode_with_drafts(ScriptedBackbone(script), NoisyDrafter(script, [False], 1), [0], answer, 5))
    assert answer.tokens == [5, 6, 7, 2]
    assert rounds[-1].emitted == (6, 7, 2)
    assert rounds[-1].accepted == 3
    assert count_rounds(rounds, 5).reached == (1, 1, 1, 0, 0), "drafts behind the end were never needed"


def test_nothing_follows_a_finished_answer() -> None:
    answer = Answer(StopRule(frozenset({2}), (), 5), letters)
    answer.append(2)
    with pytest.raises(RuntimeError, match="ended"):
        answer.append(1)


def test_rejected_depths_are_counted_once() -> None:
    rounds = [Round((4,), (), 0), Round((5, 6), (5, 9, 7), 1), Round((6,), (1, 2, 3), 0), Round((7,), (), 0)]
    counts = count_rounds(rounds, 3)
    assert (counts.passes, counts.tokens) == (3, 4)
    assert counts.reached == (2, 1, 0)
    assert counts.accepted == (1, 0, 0)
    assert add_up([counts, counts], 3).tokens == 8


def test_depths_come_from_the_rounds() -> None:
    short, long = ([Round((4,), (), 0), Round((5,) * (k + 1), (5,) * k, k), Round((6,), (), 0)] for k in (1, 4))
    both = add_up([count_rounds(short), count_rounds(long)])
    assert both.reached == (2, 1, 1, 1)
    assert both.conditional == [1.0, 1.0, 1.0, 1.0]
    assert both.drafted == 5
    assert len(count_rounds(short, 6).reached) == len(add_up([], 6).reached) == 6


def test_lookup_copies_what_followed_the_same_words() -> None:
    lookup = PromptLookup(3)
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9]
    assert lookup.propose([7, 8, 5, 7, 8], 9) == [5, 7, 8]
    assert lookup.propose([1, 2, 3], 4) == []
    assert lookup.propose([8, 5, 5, 5, 5, 5, 5, 5], 3) == [5, 5, 5], "a loop fills the whole proposal"


def test_rates() -> None:
    assert first_mismatch([1, 2, 3], [1, 2, 3]) is None
    assert first_mismatch([1, 2, 3], [1, 9, 3]) == 1
    assert first_mismatch([1, 2], [1, 2, 3]) == 2
    assert echo_rate([1, 2, 3, 4, 5], [1, 2, 3, 4, 9]) == 0.5
    assert echo_rate([1, 2], [1, 2]) == 0.0
    assert is_looping([1, 2] * 6)
    assert not is_looping(list(range(30)))


def test_broken_wiring_is_an_alarm() -> None:
    check_wiring(Acceptance(60, 99, (60, 30, 9), (30, 9, 0)), 180, "a test")
    with pytest.raises(UserError, match="no drafts at all"):
        check_wiring(Acceptance(11, 11, (0, 0, 0), (0, 0, 0)), 0, "a test")
    with pytest.raises(UserError, match="hardly any draft"):
        check_wiring(Acceptance(99, 100, (99, 1, 0), (1, 0, 0)), 297, "a test")


def test_a_mismatch_tells_where_and_how_near_the_tie_was() -> None:
    assert find_mismatch("p", [1, 2], [1, 2], [0.5, 0.1]) is None
    found = find_mismatch("p", [1, 2, 3], [1, 2], [0.5, 0.1, 0.25])
    assert found is not None
    assert (found.position, found.reference, found.got, found.top2_margin) == (2, 3, None, 0.25)
