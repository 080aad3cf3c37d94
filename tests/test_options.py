"""What may be asked of decoding: the rule it becomes, and what is refused by name."""

from __future__ import annotations

import pytest

from components.core.errors import UserError
from components.decoding.options import check_options
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, Sampling(0.0, 1.0, 0)),
        ({"seed": 7, "temperature": 0.0}, Sampling(0.0, 1.0, 7)),
        ({"temperature": 1}, Sampling(1.0, 1.0, 0)),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 3}, Sampling(0.7, 0.9, 3)),
        ({"temperature": 0, "top_p": 0.9}, Sampling(0.0, 0.9, 0)),
        ({"relaxed": 0.5}, Relaxed(0.5)),
        ({"relaxed": 0.5, "temperature": 0.0}, Relaxed(0.5)),
    ],
)
def test_options_become_a_rule(given: dict[str, object], rule: object) -> None:
    assert check_options(given).rule == rule


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.2),
        ("repetition_penalty", 1.0),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 5),
        ("logit_bias", {"7": 100}),
        ("num_beams", 4),
        ("top_k", 50),
        ("min_p", 0.1),
        ("typical_p", 0.9),
        ("n", 2),
        ("temprature", 0.5),
    ],
)
def test_what_the_draft_loop_does_not_do_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError) as refused:
        check_options({"temperature": 0.7, name: value})
    what, seen, do = str(refused.value).splitlines()
    assert what == f"error: not supported in decoding: {name}"
    assert seen == f" seen: {name}={value!r}"
    assert do == " next: leave that out; supported: temperature, top_p, seed, relaxed"


def test_every_refused_name_is_told_at_once() -> None:
    with pytest.raises(UserError, match="not supported in decoding: top_k, num_beams"):
        check_options({"top_k": 5, "temperature": -1, "num_beams": 2})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": -0.1}, "temperature is not valid"),
        ({"temperature": "0.5"}, "temperature is not valid"),
        ({"temperature": True}, "temperature is not valid"),
        ({"temperature": None}, "temperature is not valid"),
        ({"temperature": float("nan")}, "temperature is not valid"),
        ({"temperature": float("inf")}, "temperature is not valid"),
        ({"temperature": 1, "top_p": 0}, "top_p is not valid"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is not valid"),
        ({"temperature": 1, "seed": -1}, "seed is not valid"),
        ({"temperature": 1, "seed": 1.5}, "seed is not valid"),
        ({"relaxed": 0}, "relaxed is not valid"),
        ({"relaxed": float("inf")}, "relaxed is not valid"),
        ({"top_p": 0.5}, "top_p without temperature"),
        ({"top_p": 0.5, "seed": 1}, "top_p without temperature"),
        ({"seed": 7}, "seed without temperature"),
        ({"seed": 0, "relaxed": 0.5}, "seed without temperature"),
        ({"relaxed": 1.0, "temperature": 0.5}, "relaxed acceptance is for greedy decoding"),
    ],
)
def test_values_have_types_and_ranges(given: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=f"error: {told}") as refused:
        check_options(given)
    assert [line[:7] for line in str(refused.value).splitlines()] == ["error: ", " seen: ", " next: "]
