"""Verification and benchmark: honest counts, listed mismatches, an alarm on broken wiring, documents as agreed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from components.core.errors import UserError
from components.data.template import encode_prompt
from components.decoding.bootstrap import Bootstrap
from components.decoding.metrics import Acceptance
from components.decoding.outcomes import summary_rows
from components.devices.benchmark import (
    GREEDY,
    LOOKUP,
    MTP,
    Plan,
    Run,
    measure_costs,
    run_benchmark,
    timed_modes,
)
from components.devices.circumstances import created_with
from components.devices.speed import benchmark_rows, find_mismatches
from components.devices.verification import (
    check_prompt,
    check_prompt_ids,
    first_test_prompts,
    verify_bundle,
)
from components.modeling.backbone import load_backbone
from components.onnx.runtime import Bundle, open_bundle
from helpers_bundle import DRAFT_LENGTH, TASK, Oracle, Row, random_head, tiny_bundle

TEXTS = ("i has went to the store", "the cat sat on a mat", "buy milk and bread for anna")
PLAN = Plan(rounds=2, warmup_prompts=1, lookup_draft_length=4, lookup_ngram=3)
BOOTSTRAP = Bootstrap(200, seed=5)


@pytest.fixture(scope="module")
def bundle(tiny_backbone_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("benchmark") / "bundle"
    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(folder, tiny_backbone_dir, backbone, random_head(backbone))
    return open_bundle(folder, 1)


@pytest.fixture(scope="module")
def prompts(bundle: Bundle) -> list[Row]:
    rows = []
    for index, text in enumerate(TEXTS):
        ids = tuple(encode_prompt(bundle.tokenizer, TASK.rendered, {"text": text}))
        rows.append(Row(f"p{index}", "proofread", "test", {"text": text}, ids))
    return rows


class Liar:
    """Drafts what greedy decoding gives and makes the backbone believe it: decoding that is not exact."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.inner = bundle, bundle.backbone.verify

    def verify(self, tokens: Sequence[int]) -> list[int]:
        truth = self.inner(tokens)
        return truth if len(tokens) == 1 else [(token + 1) % 300 for token in truth]


def test_test_prompts_are_the_first_of_each_task() -> None:
    rows = [
        Row(f"{task}{split}{index}", task, split, {}, (1,))
        for task in ("b", "a")
        for split in ("train", "test")
        for index in range(3)
    ]
    assert [row.prompt_id for row in first_test_prompts(rows, 2)] == ["btest0", "btest1", "atest0", "atest1"]
    with pytest.raises(UserError, match="no test prompts"):
        first_test_prompts([row for row in rows if row.split == "train"], 2)


def test_exact_answers_verify(bundle: Bundle, prompts: list[Row]) -> None:
    checked = verify_bundle(bundle, prompts)["head"]
    rows, overall = summary_rows(checked, BOOTSTRAP)
    assert [row["task"] for row in rows] == ["proofread"]
    assert overall["exact_match"] == 1.0
    assert overall["mismatches"] == []
    assert overall["prompts"] == 3
    assert overall["tokens"] == 36
    assert len(overall["conditional_acceptance"]) == DRAFT_LENGTH  # type: ignore[arg-type]
    assert overall["drafts_proposed"] > 0  # type: ignore[operator]
    json.dumps(rows, allow_nan=False)


def test_acceptance_is_counted_from_the_rounds(
    bundle: Bundle, prompts: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is always right gives K + 1 tokens a pass, less what the end of the answer cuts off."""
    prompt = prompts[0]
    greedy = bundle.start_from_ids(list(prompt.prompt_ids), bundle.answer("proofread"), None).finish().answer.tokens
    oracle = Oracle(prompt.prompt_ids, greedy, bundle.manifest.backbone.vocab_size)
    monkeypatch.setattr(Bundle, "drafter", lambda self, policy: oracle)
    checked = check_prompt(bundle, prompt)["head"]
    assert checked.mismatch is None
    assert checked.acceptance.passes == math.ceil(11 / (DRAFT_LENGTH + 1))
    assert checked.acceptance.acceptance_length == 11 / 3
    assert checked.acceptance.conditional == [1.0, 1.0, 1.0]


def test_a_mismatch_is_listed_with_its_margin(
    bundle: Bundle, prompts: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle.backbone, "verify", Liar(bundle).verify)
    mismatch = check_prompt(bundle, prompts[0])["head"].mismatch
    assert mismatch is not None
    assert (mismatch.prompt_id, mismatch.position) == ("p0", 1)
    assert mismatch.got == ((mismatch.reference or 0) + 1) % 300
    assert mismatch.top2_margin > 0
    rows, _ = summary_rows([check_prompt(bundle, prompt)["head"] for prompt in prompts], BOOTSTRAP)
    assert rows[0]["exact_match"] == 0.0
    assert len(rows[0]["mismatches"]) == 3  # type: ignore[arg-type]


def test_other_prompt_ids_are_noticed(bundle: Bundle, prompts: list[Row]) -> None:
    check_prompt_ids(bundle, prompts)
    other = dataclasses.replace(prompts[1], prompt_ids=(*prompts[1].prompt_ids[:-1], 3))
    with pytest.raises(UserError, match="other tokens than the prompt table"):
        check_prompt_ids(bundle, [prompts[0], other])


def test_benchmark_document(bundle: Bundle, prompts: list[Row]) -> None:
    runs = run_benchmark(bundle, prompts, PLAN)
    assert {(run.prompt_id, run.mode, run.repeat) for run in runs} == {
        (prompt.prompt_id, mode, repeat) for prompt in prompts for mode in timed_modes(bundle) for repeat in range(2)
    }
    assert [run.mode for run in runs[:8]] == [GREEDY, MTP, "hybrid", LOOKUP, MTP, "hybrid", LOOKUP, GREEDY]
    rows, overall = benchmark_rows(runs, PLAN, BOOTSTRAP)
    wanted = {
        "prompts", "tokens", "exact_match", "mismatches", "acceptance_length", "extra_tokens_per_pass",
        "conditional_acceptance", "greedy_tokens_per_s", "mtp_tokens_per_s", "speedup", "speedup_range",
        "speedup_with_prompt", "echo_rate", "prompt_lookup_acceptance_length", "mtp_first_token_p50_ms",
        "hybrid_tokens_per_s", "hybrid_speedup_interval", "hybrid_acceptance_length",
    }  # fmt: skip
    for row in (*rows, overall):
        assert wanted <= set(row)
        assert row["mismatches"] == []
        assert row["exact_match"] == 1.0
    costs = measure_costs(bundle, prompts[0].prompt_ids)
    assert set(costs["pass_p50_ms"]) == {"1", "2", "3", "4"}  # type: ignore[call-overload]
    card = created_with(bundle)
    assert (card["threads"], card["precision"]) == (1, "float32")
    json.dumps({"created_with": card, "tasks": rows, "overall": overall, "costs": costs}, allow_nan=False)


def run(mode: str, repeat: int, pass_s: float, answer: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Run:
    rounds = Acceptance(4, 4, (0,) * 4, (0,) * 4)
    return Run("p", "t", mode, repeat, (9, 9), answer, 1.0, (pass_s,) * 4, rounds)


def test_speedup_is_the_median_of_ratios_within_repeats() -> None:
    """Greedy slows down from repeat to repeat, and so does MTP: ratios 2, 2 and 4."""
    runs = [run(GREEDY, r, s) for r, s in enumerate((1.0, 2.0, 4.0))]
    runs += [run(MTP, r, s) for r, s in enumerate((0.5, 1.0, 1.0))]
    runs += [run(LOOKUP, r, s) for r, s in enumerate((1.0, 2.0, 4.0))]
    _, row = benchmark_rows(runs, PLAN, BOOTSTRAP)
    assert row["speedup"] == 2.0
    assert row["speedup_range"] == [2.0, 4.0]
    assert row["greedy_tokens_per_s"] == 0.5
    assert row["mtp_tokens_per_s"] == 1.0
    assert row["prompt_lookup_speedup"] == 1.0
    assert row["speedup_with_prompt"] == pytest.approx(9 / 5)
    assert row["mtp_pass_p50_ms"] == 1000.0


def test_answers_that_differ_are_listed() -> None:
    runs = [run(GREEDY, 0, 1.0), run(MTP, 0, 1.0, (1, 2, 7, 4, 5)), run(LOOKUP, 0, 1.0), run(GREEDY, 1, 1.0, (1, 2))]
    assert [(m["mode"], m["repeat"], m["position"], m["got"]) for m in find_mismatches(runs)] == [
        (MTP, 0, 2, 7),
        (GREEDY, 1, 2, None),
    ]


def test_no_timing_without_a_warm_up(bundle: Bundle, prompts: list[Row]) -> None:
    with pytest.raises(UserError, match="warm-up"):
        run_benchmark(bundle, prompts, dataclasses.replace(PLAN, warmup_prompts=0))


def test_the_interval_of_a_speedup_draws_prompts_not_repeats() -> None:
    """Some prompts gain twofold, others threefold; every repeat says the same, yet other prompts could say another."""
    runs = []
    for repeat in range(2):
        for number in range(30):
            for mode, seconds in ((GREEDY, 6.0), (MTP, 2.0 if number % 2 else 3.0), (LOOKUP, 6.0)):
                runs.append(dataclasses.replace(run(mode, repeat, seconds), prompt_id=f"p{number}"))
    _, row = benchmark_rows(runs, PLAN, BOOTSTRAP)
    assert row["speedup"] == pytest.approx(2.4)
    assert row["speedup_range"] == pytest.approx([2.4, 2.4])
    low, high = row["speedup_interval"]  # type: ignore[misc]
    assert 2.0 < low < 2.3 < 2.5 < high < 3.0
    assert row["prompt_lookup_speedup_interval"] == pytest.approx([1.0, 1.0])
    assert row["speedup_with_prompt_interval"][0] < row["speedup_with_prompt"]  # type: ignore[index]
