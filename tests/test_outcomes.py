"""Rows of the evidence: what is pooled, what is averaged, and how sure a figure is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from components.decoding.bootstrap import Bootstrap, ratio
from components.decoding.loop import Round
from components.decoding.outcomes import Outcome, acceptance_figures, judge, mode_lines, mode_rows, summary_rows

BOOTSTRAP = Bootstrap(400, seed=3)
PREFILL = Round((1,), (), 0)


def outcome(
    per_pass: int, passes: int = 4, *, drafts: int = 3, prompt: int = 10, task: str = "t", looping: bool = False
) -> Outcome:
    """An answer whose every pass emits ``per_pass`` tokens; distinct ones, unless it loops."""
    tokens = iter([7] * 999 if looping else range(100, 999))
    rounds = [PREFILL]
    for _ in range(passes):
        emitted = tuple(next(tokens) for _ in range(per_pass))
        drafted = (*emitted[:-1], *(-1,) * (drafts - per_pass + 1))
        rounds.append(Round(emitted, drafted, per_pass - 1))
    answer = [token for round_ in rounds for token in round_.emitted]
    return judge("p", task, range(2000, 2000 + prompt), answer, [1.0] * len(answer), rounds)


def inside(interval: Any, value: Any) -> bool:
    return bool(interval[0] <= value <= interval[1])


def test_an_interval_holds_the_pooled_value_and_comes_again() -> None:
    outcomes = [outcome(n % 3 + 1, n % 5 + 1) for n in range(40)]
    row = acceptance_figures(outcomes, BOOTSTRAP)
    for name in ("acceptance_length", "extra_tokens_per_pass", "extra_tokens_per_pass_by_prompts"):
        low, high = row[f"{name}_interval"]  # type: ignore[misc]
        assert low < row[name] < high
        assert high - low < 0.7
    assert acceptance_figures(outcomes, BOOTSTRAP) == row
    assert acceptance_figures(outcomes, Bootstrap(400, seed=4)) != row


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        passes = random.integers(1, 9, size=50)
        tokens = passes + random.binomial(passes, 0.4)
        hits += inside(Bootstrap(200, seed=trial).interval(ratio, list(tokens), list(passes)), 1.4)
    assert 178 <= hits <= 199


def test_more_prompts_make_a_narrower_interval() -> None:
    few, many = ([outcome(n % 3 + 1) for n in range(size)] for size in (12, 300))
    widths = [np.ptp(acceptance_figures(part, BOOTSTRAP)["acceptance_length_interval"]) for part in (few, many)]  # type: ignore[arg-type]
    assert widths[1] < widths[0] / 3


def test_a_long_answer_counts_by_its_passes_or_as_one_prompt() -> None:
    row = acceptance_figures([outcome(3, 30), outcome(1, 10)], BOOTSTRAP)
    assert row["extra_tokens_per_pass"] == pytest.approx(60 / 40)
    assert row["extra_tokens_per_pass_by_prompts"] == pytest.approx(1.0)


def test_buckets_add_up() -> None:
    lengths = (5, 63, 64, 127, 128, 255, 256, 400)
    row = acceptance_figures([outcome(n % 3 + 1, prompt=length) for n, length in enumerate(lengths)], BOOTSTRAP)
    buckets: Any = row["by_prompt_length"]
    assert [(b["prompt_tokens_from"], b["prompt_tokens_below"]) for b in buckets] == [
        (0, 64),
        (64, 128),
        (128, 256),
        (256, None),
    ]
    assert [bucket["prompts"] for bucket in buckets] == [2, 2, 2, 2]
    assert sum(bucket["tokens"] for bucket in buckets) == row["tokens"]
    assert all(inside(b["extra_tokens_per_pass_interval"], b["extra_tokens_per_pass"]) for b in buckets)
    one = acceptance_figures([outcome(2, prompt=70)], BOOTSTRAP)["by_prompt_length"]
    assert [bucket["prompt_tokens_from"] for bucket in one] == [64], "no rows of nothing"  # type: ignore[attr-defined]


def test_loops_are_set_apart() -> None:
    calm, loops = [outcome(2)] * 3, [outcome(4, looping=True)]
    row = acceptance_figures([*calm, *loops], BOOTSTRAP)
    assert row["loop_share"] == 0.25
    assert row["extra_tokens_per_pass"] == 1.5
    assert row["extra_tokens_per_pass_without_loops"] == 1.0
    alone = acceptance_figures(loops, BOOTSTRAP)
    assert alone["extra_tokens_per_pass_without_loops"] is None
    assert alone["extra_tokens_per_pass_without_loops_interval"] is None


def test_drafts_of_varying_length_share_a_row() -> None:
    row = acceptance_figures([outcome(2, drafts=1), outcome(6, drafts=7)], BOOTSTRAP)
    assert row["conditional_acceptance"] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert row["drafts_reached"] == [8, 4, 4, 4, 4, 4, 0]
    assert row["drafts_proposed"] == 4 * 1 + 4 * 7


def test_an_answer_of_one_token_has_no_pass_and_breaks_nothing() -> None:
    row = acceptance_figures([outcome(1, 0)], BOOTSTRAP)
    assert row["extra_tokens_per_pass"] == 0.0
    assert row["acceptance_length_interval"] is None
    assert row["extra_tokens_per_pass_by_prompts"] is None
    json.dumps(row, allow_nan=False)
    with pytest.raises(ValueError, match="no prompts"):
        acceptance_figures([], BOOTSTRAP)


def test_rows_are_per_task_and_list_what_differs() -> None:
    wrong = judge("q", "b", [1], [1, 2, 3], [9.0, 9.0, 0.5], [PREFILL, Round((2, 4), (2,), 1)])
    rows, overall = summary_rows([outcome(2, task="b"), wrong, outcome(3, task="a")], BOOTSTRAP)
    assert [(row["task"], row["prompts"], row["exact_match"]) for row in rows] == [("b", 2, 0.5), ("a", 1, 1.0)]
    assert overall["exact_match"] == pytest.approx(2 / 3)
    assert (
        overall["mismatches"]
        == [{"prompt_id": "q", "position": 2, "reference": 3, "got": 4, "top2_margin": 0.5}]
        == rows[0]["mismatches"]
    )
    json.dumps([rows, overall], allow_nan=False)


def test_every_mode_has_its_rows_and_the_default_one_is_on_top() -> None:
    by_mode = {"head": [outcome(1)], "hybrid": [outcome(2)]}
    rows = mode_rows(by_mode, "hybrid", Bootstrap(50))
    assert rows["default_mode"] == "hybrid"
    beside = {"head_extra_tokens_per_pass": 0.0, "hybrid_extra_tokens_per_pass": 1.0}
    assert rows["overall"] == rows["modes"]["hybrid"]["overall"] | beside  # type: ignore[index]
    assert rows["modes"]["head"]["tasks"][0]["acceptance_length"] == 1.0  # type: ignore[index]
    assert mode_lines(rows) == (
        "1 prompts; head 0.00 extra tokens per pass, 100.0% exact; hybrid 1.00 extra tokens per pass, 100.0% exact"
    )
