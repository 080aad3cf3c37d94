"""From prompts decoded in both modes to the rows of the evidence: the one place where acceptance becomes a figure.

Owns what is kept of a prompt and what a row says: pooled over passes and as a mean over prompts, per prompt length,
with and without looping answers, each with its interval. It refuses a row of no prompts. Its surprising decision: the
number of depths comes from the rounds themselves, so drafts of varying length need no setting here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from components.decoding.bootstrap import Bootstrap, ratio
from components.decoding.comparison import Mismatch, find_mismatch
from components.decoding.loop import Round
from components.decoding.metrics import Acceptance, add_up, count_rounds, echo_rate, is_looping

BUCKET_STARTS = (0, 64, 128, 256)  # prompt tokens


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded plainly and with drafts.

    Attributes:
        prompt_tokens: length of the prompt, template included.
        tokens: length of the answer with drafts.
        echo: share of the answer's 4-grams that stand in the prompt.
        looping: whether the answer repeats itself.
        mismatch: where it left the greedy answer.
    """

    prompt_id: str
    task: str
    prompt_tokens: int
    tokens: int
    acceptance: Acceptance
    echo: float
    looping: bool
    mismatch: Mismatch | None


def judge(
    prompt_id: str,
    task: str,
    prompt: Sequence[int],
    reference: Sequence[int],
    margins: Sequence[float],
    rounds: Sequence[Round],
) -> Outcome:
    """What one prompt came to.

    Args:
        prompt: its token ids.
        reference: greedy answer.
        margins: greedy logit of the best token minus that of the second, per token of ``reference``.
        rounds: the run with drafts, prefill first.
    """
    answer = [token for round_ in rounds for token in round_.emitted]
    mismatch = find_mismatch(prompt_id, reference, answer, margins)
    counts = count_rounds(rounds)
    echo, looping = echo_rate(prompt, answer), is_looping(answer)
    return Outcome(prompt_id, task, len(prompt), len(answer), counts, echo, looping, mismatch)


def total_acceptance(outcomes: Sequence[Outcome]) -> Acceptance:
    """Counts over all prompts."""
    return add_up([outcome.acceptance for outcome in outcomes])


def summary_rows(
    outcomes: Sequence[Outcome], bootstrap: Bootstrap
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Evidence rows: one per task, and one over all; ``outcomes`` in a fixed order, so that intervals come again."""
    tasks = dict.fromkeys(outcome.task for outcome in outcomes)
    rows = [
        {"task": task, **summary_row([outcome for outcome in outcomes if outcome.task == task], bootstrap)}
        for task in tasks
    ]
    return rows, summary_row(outcomes, bootstrap)


def mode_rows(by_mode: Mapping[str, Sequence[Outcome]], default: str, bootstrap: Bootstrap) -> dict[str, object]:
    """``tasks`` and ``overall`` of the default mode, and ``modes`` with those of every mode under its name.

    The default mode's rows name the extra tokens of the other modes beside their own.
    """
    modes: dict[str, Any] = {}
    for mode, outcomes in by_mode.items():
        rows, overall = summary_rows(outcomes, bootstrap)
        modes[mode] = {"tasks": rows, "overall": overall}
    key = "extra_tokens_per_pass"
    tasks = [
        row | {f"{mode}_{key}": part["tasks"][at][key] for mode, part in modes.items()}
        for at, row in enumerate(modes[default]["tasks"])
    ]
    overall = modes[default]["overall"] | {f"{mode}_{key}": part["overall"][key] for mode, part in modes.items()}
    return {"default_mode": default, "tasks": tasks, "overall": overall, "modes": modes}


def mode_lines(rows: Mapping[str, Any]) -> str:
    """What :func:`mode_rows` says, in one line for people."""
    found = {mode: part["overall"] for mode, part in rows["modes"].items()}
    said = [
        f"{mode} {one['extra_tokens_per_pass']:.2f} extra tokens per pass, {one['exact_match']:.1%} exact"
        for mode, one in found.items()
    ]
    return f"{found[rows['default_mode']]['prompts']} prompts; " + "; ".join(said)


def summary_row(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> dict[str, object]:
    """Exactness and acceptance of one row.

    Raises:
        ValueError: no prompts.
    """
    mismatches = [asdict(outcome.mismatch) for outcome in outcomes if outcome.mismatch is not None]
    figures = acceptance_figures(outcomes, bootstrap)
    return {"exact_match": 1.0 - len(mismatches) / len(outcomes), "mismatches": mismatches, **figures}


def acceptance_figures(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> dict[str, object]:
    """Everything about acceptance; null where there is nothing to measure, such as calm answers when all loop.

    Raises:
        ValueError: no prompts.
    """
    if not outcomes:
        raise ValueError("a row of no prompts says nothing")
    total = total_acceptance(outcomes)
    calm = [outcome for outcome in outcomes if not outcome.looping]
    return {
        "prompts": len(outcomes),
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "acceptance_length": total.acceptance_length,
        "acceptance_length_interval": _tau_interval(outcomes, bootstrap),
        "extra_tokens_per_pass": max(total.acceptance_length - 1.0, 0.0),
        "extra_tokens_per_pass_interval": _extra_interval(outcomes, bootstrap),
        **_by_prompts(outcomes, bootstrap),
        "conditional_acceptance": total.conditional,
        "drafts_reached": list(total.reached),
        "drafts_proposed": total.drafted,
        "loop_share": fmean(outcome.looping for outcome in outcomes),
        "extra_tokens_per_pass_without_loops": _extra(calm),
        "extra_tokens_per_pass_without_loops_interval": _extra_interval(calm, bootstrap),
        "by_prompt_length": _buckets(outcomes, bootstrap),
        "echo_rate": fmean(outcome.echo for outcome in outcomes),
    }


def _extra(outcomes: Sequence[Outcome]) -> float | None:
    total = total_acceptance(outcomes)
    return total.acceptance_length - 1.0 if total.passes else None


def _tau_interval(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> list[float] | None:
    counts = [outcome.acceptance for outcome in outcomes]
    return bootstrap.interval(ratio, [count.tokens for count in counts], [count.passes for count in counts])


def _extra_interval(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> list[float] | None:
    tau = _tau_interval(outcomes, bootstrap)
    return None if tau is None else [bound - 1.0 for bound in tau]


def _by_prompts(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> dict[str, object]:
    """Mean over prompts of each prompt's own extra tokens per pass: a long answer weighs no more than a short one."""
    taus = [outcome.acceptance.acceptance_length for outcome in outcomes if outcome.acceptance.passes]
    extra = [tau - 1.0 for tau in taus]
    name = "extra_tokens_per_pass_by_prompts"
    return {
        name: fmean(extra) if extra else None,
        f"{name}_interval": bootstrap.interval(ratio, extra, [1.0] * len(extra)),
    }


def _buckets(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> list[dict[str, object]]:
    """Acceptance per prompt length; a bucket without prompts is left out."""
    buckets: list[dict[str, object]] = []
    for start, end in zip(BUCKET_STARTS, (*BUCKET_STARTS[1:], None), strict=True):
        inside = [one for one in outcomes if start <= one.prompt_tokens and (end is None or one.prompt_tokens < end)]
        if inside:
            buckets.append(
                {
                    "prompt_tokens_from": start,
                    "prompt_tokens_below": end,
                    "prompts": len(inside),
                    "tokens": sum(outcome.tokens for outcome in inside),
                    "extra_tokens_per_pass": _extra(inside),
                    "extra_tokens_per_pass_interval": _extra_interval(inside, bootstrap),
                }
            )
    return buckets
