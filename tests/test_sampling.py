"""Sampling with drafts and without comes from one distribution: counted, and compared with the probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.decoding import sampling
from components.decoding.loop import Drafter, Round, Rule, decode_greedy, decode_with_drafts
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling, nucleus
from components.decoding.stopping import Answer, StopRule

VOCABULARY = 4
PROMPT = [1, 3]
TOKENS = 4
# Logits by the last two tokens.
TABLE = np.random.default_rng(5).normal(0.0, 1.3, (VOCABULARY,) * 3).astype(np.float32)


class KnownBackbone:
    """Logits depend on the last two tokens by the table; refuses passes that were never settled."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tentative: list[int] = []
        self.max_length = 10_000
        self.last_logits = TABLE[0, :1]

    @property
    def length(self) -> int:
        return len(self.tokens)

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        return TABLE[tokens[-2], tokens[-1]]

    def prefill(self, tokens: Sequence[int]) -> int:
        self.tokens, self.tentative = list(tokens), []
        self.last_logits = self.after(tokens)[None]
        return int(self.last_logits[0].argmax())

    rewind = prefill

    def verify(self, tokens: Sequence[int]) -> list[int]:
        assert not self.tentative, "the last pass was never settled with keep()"
        self.tentative = list(tokens)
        known = [*self.tokens, *tokens]
        before = range(len(self.tokens), len(known))
        self.last_logits = TABLE[[known[at - 1] for at in before], [known[at] for at in before]]
        return [int(token) for token in self.last_logits.argmax(axis=-1)]

    def keep(self, rows: int) -> None:
        assert 1 <= rows <= len(self.tentative)
        self.tokens += self.tentative[:rows]
        self.tentative = []


@dataclass
class Ranked:
    """Drafts the token of the given rank, 0 the likeliest, at every place; good with 0, bad with the last."""

    backbone: KnownBackbone
    ranks: Sequence[int]

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        context = list(tokens)
        while len(context) - len(tokens) < limit:
            rank = self.ranks[len(context) % len(self.ranks)]
            context.append(int(np.argsort(-self.backbone.after(context))[rank]))
        return context[len(tokens) :]


class Remembered(Sampling):
    """The same, but each row of the table is turned into probabilities once, not for every token of every answer."""

    known: ClassVar[dict[tuple[float, float, bytes], np.ndarray]] = {}

    def distribution(self, logits: np.ndarray) -> np.ndarray:
        row = (self.temperature, self.top_p, logits.tobytes())
        if row not in self.known:
            self.known[row] = super().distribution(logits)
            self.known[row].flags.writeable = False
        return self.known[row]


DRAFTERS = {"none": None, "good": (0,), "bad": (VOCABULARY - 1,), "mixed": (0, 1, 0, 2)}


def run(
    rule: Rule, ranks: Sequence[int] | None, budget: int = TOKENS, draft_length: int = 3, stop: StopRule | None = None
) -> tuple[Answer, list[Round]]:
    backbone = KnownBackbone()
    drafter: Drafter | None = Ranked(backbone, ranks) if ranks else None
    answer = Answer(stop or StopRule(frozenset(), (), budget), decode)
    return answer, list(decode_with_drafts(backbone, drafter, PROMPT, answer, draft_length, rule))


def decode(tokens: Sequence[int]) -> str:
    return "".join("abcd"[token] for token in tokens)


def statistic(rule: Sampling, ranks: Sequence[int] | None, answers: int) -> tuple[float, float]:
    """Chi-square of whole answers against their probabilities, and its bound (one in 30,000 would pass it)."""
    backbone, expected = KnownBackbone(), {}
    for answer in product(range(VOCABULARY), repeat=TOKENS):
        context, probability = list(PROMPT), 1.0
        for token in answer:
            probability *= rule.distribution(backbone.after(context))[token]
            context.append(token)
        expected[answer] = probability * answers
    seen = dict.fromkeys(expected, 0)
    for seed in range(answers):
        seen[tuple(run(replace(rule, seed=seed), ranks)[0].tokens)] += 1
    assert not any(seen[answer] for answer, count in expected.items() if count == 0), "cut off by top-p"
    rare = [answer for answer, count in expected.items() if 0 < count < 5]
    common = [answer for answer, count in expected.items() if count >= 5]
    pairs = [(seen[answer], expected[answer]) for answer in common]
    if sum(expected[answer] for answer in rare) >= 5:
        pairs.append((sum(seen[answer] for answer in rare), sum(expected[answer] for answer in rare)))
    return sum((got - wanted) ** 2 / wanted for got, wanted in pairs), bound(len(pairs) - 1)


def bound(freedom: int, deviations: float = 4.0) -> float:
    """Quantile of the chi-square distribution (Wilson and Hilferty 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + deviations * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("none", Remembered(1.7, 0.85)),
        ("good", Remembered(0.6)),
        ("bad", Remembered(1.7, 0.85)),
        ("mixed", Remembered()),
        ("mixed", Remembered(1.7, 0.85)),
        ("mixed", Remembered(0.8, 0.5)),
    ],
)
def test_whole_answers_come_as_often_as_they_should(drafter: str, rule: Sampling) -> None:
    found, limit = statistic(rule, DRAFTERS[drafter], 20_000)
    assert found < limit


@pytest.mark.parametrize("rule", [Remembered(0.6), Remembered(1.7, 0.85)])
def test_the_count_would_notice_a_second_chance_for_the_draft(rule: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic fault: after a rejection, drawing from the whole distribution."""
    monkeypatch.setattr(sampling, "without", lambda probabilities, token: probabilities)
    found, limit = statistic(rule, DRAFTERS["mixed"], 4_000)
    assert found > 2 * limit


def test_the_count_would_notice_another_temperature() -> None:
    class Warmer(Sampling):
        def begin(self):  # type: ignore[no-untyped-def]
            return Sampling(self.temperature * 1.2, self.top_p, self.seed).begin()

    found, limit = statistic(Warmer(0.6), DRAFTERS["good"], 4_000)
    assert found > limit


def test_good_drafts_are_mostly_accepted_and_bad_ones_are_not() -> None:
    shares = {}
    for name in ("good", "bad"):
        rounds = run(Sampling(0.6), DRAFTERS[name], budget=900)[1]
        shares[name] = sum(len(round_.emitted) - 1 for round_ in rounds[1:]) / len(rounds)
    assert shares["good"] > 1.0 > 0.2 > shares["bad"]


# --- seeds, limits, cold sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_gives_the_text_again_and_another_seed_another(drafter: str) -> None:
    first, again, other = (run(Sampling(1.0, 0.9, seed), DRAFTERS[drafter], 60)[0].tokens for seed in (4, 4, 5))
    assert first == again != other


def test_one_rule_serves_many_answers() -> None:
    rule = Sampling(1.0, 1.0, 9)
    assert run(rule, None, 40)[0].tokens == run(rule, None, 40)[0].tokens


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
    draft_length=st.integers(1, 7),
    budget=st.integers(1, 30),
    eos=st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    stop=st.sampled_from(["", "ab", "dda", "c"]),
    rule=st.sampled_from([Sampling(1.0), Sampling(1.5, 0.8), Relaxed(0.7), Relaxed(50.0)]),
)
def test_an_answer_ends_where_its_tokens_say_so(
    seed: int, ranks: list[int], draft_length: int, budget: int, eos: frozenset[int], stop: str, rule: Rule
) -> None:
    """End of sequence, stop text and limit may fall inside an accepted run; what follows them is not emitted."""
    stopping = StopRule(eos, (stop,) if stop else (), budget)
    rule = Sampling(rule.temperature, rule.top_p, seed) if isinstance(rule, Sampling) else rule
    answer, rounds = run(rule, ranks, budget, draft_length, stopping)
    one_by_one = Answer(stopping, decode)
    ended = [one_by_one.append(token) for token in answer.tokens]
    assert ended == [False] * (len(ended) - 1) + [True]
    assert (one_by_one.stop_reason, one_by_one.text()) == (answer.stop_reason, answer.text())
    assert [token for round_ in rounds for token in round_.emitted] == answer.tokens
    assert all(0 <= round_.departed <= round_.accepted <= len(round_.emitted) for round_ in rounds)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", [Sampling(0.0, 0.3), Sampling(1e-3), Sampling(1e-300), Sampling(1.0, 1e-9)])
def test_cold_sampling_is_greedy(drafter: str, rule: Sampling) -> None:
    greedy = Answer(StopRule(frozenset(), (), 50), decode)
    list(decode_greedy(KnownBackbone(), PROMPT, greedy))
    assert run(rule, DRAFTERS[drafter], 50)[0].tokens == greedy.tokens


# --- the distribution ---------------------------------------------------------------------------------------------


def test_temperature_divides_the_logits() -> None:
    logits = np.array([2.0, 0.0, -1e30, -np.inf], dtype=np.float32)
    wanted = np.array([np.exp(4.0), 1.0, 0.0, 0.0]) / (np.exp(4.0) + 1.0)
    np.testing.assert_allclose(Sampling(0.5).distribution(logits), wanted, rtol=1e-12)
    huge = np.array([3e38, -3e38], dtype=np.float32)
    np.testing.assert_array_equal(Sampling(1.0).distribution(huge), [1.0, 0.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any), st.floats(1e-9, 1.0))
def test_top_p_keeps_the_smallest_set(weights: list[int], top_p: float) -> None:
    whole = np.array(weights, dtype=np.float64) / sum(weights)
    cut = nucleus(whole, top_p)
    assert cut.sum() == pytest.approx(1.0)
    if top_p == 1:
        assert (cut == whole).all()
        return
    kept = whole[cut > 0]
    assert kept.sum() >= top_p - 1e-12, "it holds top_p"
    assert kept.sum() - kept.min() < top_p, "no smaller set does"
    assert kept.min() >= whole[cut == 0].max(initial=0.0), "nothing likelier was left out"
    np.testing.assert_allclose(cut[cut > 0], kept / kept.sum())


def test_top_p_by_hand() -> None:
    whole = np.array([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(nucleus(whole, 0.5), [0, 1, 0, 0])
    np.testing.assert_allclose(nucleus(whole, 0.51), [0, 2 / 3, 0, 1 / 3])
    np.testing.assert_allclose(nucleus(np.full(4, 0.25), 0.5), [0.5, 0.5, 0, 0], err_msg="lower ids win ties")


# --- relaxed acceptance -------------------------------------------------------------------------------------------


def test_a_wide_margin_takes_every_draft_and_counts_what_it_took() -> None:
    answer, rounds = run(Relaxed(99.0), (1,), 41)
    assert [len(round_.emitted) for round_ in rounds[1:]] == [4] * 10
    assert {(round_.accepted, round_.departed) for round_ in rounds[1:]} == {(3, 3)}
    assert len(answer.tokens) == 41


def test_the_margin_is_measured_in_logits() -> None:
    for margin in (0.3, 1.0):
        for round_, drafted in _judged(margin):
            assert [gap <= margin for gap in drafted[: round_.accepted]] == [True] * round_.accepted
            assert round_.accepted == len(drafted) or drafted[round_.accepted] > margin
            assert round_.departed == sum(gap > 0 for gap in drafted[: round_.accepted])


def _judged(margin: float) -> list[tuple[Round, list[float]]]:
    """Rounds with how far below the best each of their drafts lay."""
    backbone, context, judged = KnownBackbone(), list(PROMPT), []
    for round_ in run(Relaxed(margin), (0, 1, 2, 1), 200)[1]:
        gaps = []
        for at, draft in enumerate(round_.drafted):
            row = backbone.after([*context, *round_.drafted[:at]])
            gaps.append(float(row.max() - row[draft]))
        judged.append((round_, gaps))
        context += round_.emitted
    return judged
