"""The figures of each drafter in comparison.json, from its timed answers.

Owns what a row says of acceptance, rows, steps and seconds. It refuses to call a modelled figure measured: the
speed-up by the cost model has that in its name, and seconds are told as they were, beside those of plain decoding in
the same run. Its surprising decision: the model charges every trained drafter the price of one step of the head for
each run of its own, whatever its size, so that ways to draft are compared and not implementations.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from components.baselines.contest import Contender, Timed
from components.core.config import Drafting
from components.decoding.bootstrap import Bootstrap
from components.decoding.outcomes import acceptance_figures, summary_row

OVERALL = "overall"


def drafter_rows(
    contender: Contender, timed: Sequence[Timed], tasks: Sequence[str], bootstrap: Bootstrap, costs: Drafting
) -> dict[str, Any]:
    """One drafter's rows: each task, then all together, and what each of its answers took.

    Raises:
        ValueError: no answers.
    """
    parts = {task: [one for one in timed if one.outcome.task == task] for task in tasks}
    rows = [comparison_row(contender, task, part, bootstrap, costs) for task, part in parts.items() if part]
    return {
        "tasks": rows,
        OVERALL: comparison_row(contender, OVERALL, timed, bootstrap, costs),
        "seconds": {one.outcome.prompt_id: one.seconds for one in timed},
    }


def comparison_row(
    contender: Contender, task: str, timed: Sequence[Timed], bootstrap: Bootstrap, costs: Drafting
) -> dict[str, Any]:
    """Figures of one drafter on one task."""
    outcomes = [one.outcome for one in timed]
    text = summary_row(outcomes, bootstrap) if contender.exact else changed_text(timed, bootstrap)
    return {"task": task, **text, **pass_figures(timed, costs), **times(timed)}


def changed_text(timed: Sequence[Timed], bootstrap: Bootstrap) -> dict[str, Any]:
    """In place of exactness: how much of the text was not the backbone's choice, and how many answers that changed."""
    outcomes = [one.outcome for one in timed]
    return {
        "departed_share": sum(one.departed for one in timed) / sum(one.tokens for one in outcomes),
        "changed_answers": sum(one.mismatch is not None for one in outcomes) / len(outcomes),
        **acceptance_figures(outcomes, bootstrap),
    }


def pass_figures(timed: Sequence[Timed], costs: Drafting) -> dict[str, float | None]:
    """Means over the passes after the prompt's; the speed-up by the cost model against one token a pass.

    A run of the drafter over several nodes of a tree counts as one step. Null without passes, and for the speed-up
    where a pass is wider than the model knows.
    """
    widths = [width for one in timed for width in one.widths]
    steps = sum(one.times.steps for one in timed)
    if not widths:
        names = ("drafts_per_round", "rows_per_pass", "steps_per_round", "modelled_speedup")
        return dict.fromkeys(names)
    rows, tokens = statistics.fmean(widths), sum(one.outcome.acceptance.tokens for one in timed)
    modelled = None
    if max(widths) <= len(costs.pass_cost):
        modelled = tokens / (sum(costs.pass_cost[width - 1] for width in widths) + steps * costs.step_cost)
    return {
        "drafts_per_round": rows - 1,
        "rows_per_pass": rows,
        "steps_per_round": steps / len(widths),
        "modelled_speedup": modelled,
    }


def times(timed: Sequence[Timed]) -> dict[str, Any]:
    """Medians of milliseconds per draft and for the drafter's pass over a prompt, and of seconds per whole answer."""
    measured = [one.times for one in timed]
    step = _median([ms for one in measured for ms in one.step_ms])
    firsts = [one.first_ms - one.first_drafts * (step["median"] or 0.0) for one in measured if one.first_ms is not None]
    return {
        "draft_ms_per_step": step,
        "prompt_pass_ms": _median([max(ms, 0.0) for ms in firsts]),
        "seconds_per_answer": _median([one.seconds for one in timed]),
        "draft_seconds_per_answer": _median([one.times.total_ms / 1e3 for one in timed]),
        "plain_seconds_per_answer": _median([one.plain_seconds for one in timed]),
    }


def plain_seconds(timed: Sequence[Timed]) -> dict[str, float]:
    """Seconds of the plain answer to each prompt; any drafter's answers tell them."""
    return {one.outcome.prompt_id: one.plain_seconds for one in timed}


def _median(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values) if values else None, "samples": len(values)}
