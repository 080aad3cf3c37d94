"""From timed runs to the rows of a benchmark: speeds, speed-ups with intervals, acceptance, answers that differ.

Owns the arithmetic of speed. It refuses to compare modes across repeats: speed-up is the median of the ratios within a
repeat. Its surprising decision: each speed-up has two spreads. The range over repeats shows how steady the machine was;
the interval over prompts, all repeats of a prompt drawn together, shows how much other prompts could change the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from components.decoding.bootstrap import Array, Bootstrap, ratio
from components.decoding.metrics import add_up, echo_rate, first_mismatch, is_looping
from components.decoding.outcomes import Outcome, acceptance_figures
from components.devices.benchmark import GREEDY, MTP, Plan, Run

Cost = Callable[[Run], tuple[float, float]]  # tokens and seconds of a run


def benchmark_rows(
    runs: Sequence[Run], plan: Plan, bootstrap: Bootstrap
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Evidence rows: one per task, and one over all."""
    tasks = dict.fromkeys(run.task for run in runs)
    rows = [
        {"task": task, **benchmark_row([run for run in runs if run.task == task], plan, bootstrap)} for task in tasks
    ]
    return rows, benchmark_row(runs, plan, bootstrap)


def benchmark_row(runs: Sequence[Run], plan: Plan, bootstrap: Bootstrap) -> dict[str, object]:
    """One row; acceptance is that of the first repeat, since the others repeat it to the token."""
    first = [run for run in runs if run.repeat == 0]
    outcomes = [_outcome(run) for run in first if run.mode == MTP]
    mismatches = find_mismatches(runs)
    differing = {mismatch["prompt_id"] for mismatch in mismatches if mismatch["mode"] == MTP}
    row: dict[str, object] = {
        "repeats": plan.rounds,
        "exact_match": 1.0 - len(differing) / len(outcomes),
        "mismatches": mismatches,
        **acceptance_figures(outcomes, bootstrap),
    }
    for mode in dict.fromkeys(run.mode for run in runs):
        row |= _mode_figures([run for run in runs if run.mode == mode], mode)
        if mode != GREEDY:
            row[f"{mode}_acceptance_length"] = add_up(
                [run.acceptance for run in first if run.mode == mode]
            ).acceptance_length
            name = "speedup" if mode == MTP else f"{mode}_speedup"
            row |= _speedup(runs, mode, name, decode_cost, bootstrap)
            row |= _speedup(runs, mode, f"{name}_with_prompt", whole_cost, bootstrap)
    return row


def _outcome(run: Run) -> Outcome:
    """A timed run as an outcome; whether it is exact is listed for all modes and repeats by find_mismatches."""
    echo, looping = echo_rate(run.prompt, run.answer), is_looping(run.answer)
    tokens = len(run.answer)
    return Outcome(run.prompt_id, run.task, len(run.prompt), tokens, run.acceptance, echo, looping, mismatch=None)


def decode_cost(run: Run) -> tuple[float, float]:
    """Tokens after the first, and seconds after the first."""
    return len(run.answer) - 1, run.decode_s


def whole_cost(run: Run) -> tuple[float, float]:
    """All tokens, and all seconds, prefill included."""
    return len(run.answer), run.first_token_s + run.decode_s


def _speed(runs: Sequence[Run], cost: Cost) -> float:
    """Tokens per second, pooled over answers; 0 when none has a token that counts."""
    costs = [cost(run) for run in runs]
    tokens, seconds = (sum(part) for part in zip(*costs, strict=True))
    return tokens / seconds if seconds else 0.0


def _mode_figures(runs: Sequence[Run], mode: str) -> dict[str, object]:
    repeats = [[run for run in runs if run.repeat == repeat] for repeat in _repeats(runs)]
    per_repeat = [_speed(part, decode_cost) for part in repeats]
    passes = [seconds for run in runs for seconds in run.pass_s]
    return {
        f"{mode}_tokens_per_s": statistics.median(per_repeat),
        f"{mode}_tokens_per_s_range": [min(per_repeat), max(per_repeat)],
        f"{mode}_tokens_per_s_with_prompt": statistics.median(_speed(part, whole_cost) for part in repeats),
        f"{mode}_first_token_p50_ms": 1000 * statistics.median(run.first_token_s for run in runs),
        f"{mode}_pass_p50_ms": 1000 * statistics.median(passes) if passes else 0.0,
    }


def _speedup(runs: Sequence[Run], mode: str, name: str, cost: Cost, bootstrap: Bootstrap) -> dict[str, object]:
    """The mode's speed over greedy's in the same repeat: median, range over repeats, interval over prompts.

    0 where greedy has no speed.
    """
    columns = _cost_columns(runs, mode, cost)
    ratios = np.nan_to_num(_ratios(*columns.sum(axis=1))).tolist()
    return {
        name: statistics.median(ratios),
        f"{name}_range": [min(ratios), max(ratios)],
        f"{name}_interval": bootstrap.interval(lambda *sums: np.median(_ratios(*sums), axis=0), *columns),
    }


def _cost_columns(runs: Sequence[Run], mode: str, cost: Cost) -> Array:
    """[4 per repeat, prompts]: tokens and seconds of the mode, then of greedy."""
    prompts = list(dict.fromkeys(run.prompt_id for run in runs))
    of_run = {(run.mode, run.repeat, run.prompt_id): cost(run) for run in runs}
    costs = [
        [[of_run[which, repeat, prompt][part] for prompt in prompts] for which in (mode, GREEDY) for part in (0, 1)]
        for repeat in _repeats(runs)
    ]
    return np.array(costs, dtype=np.float64).reshape(-1, len(prompts))


def _ratios(*sums: Array) -> Array:
    """Speed-up of each repeat from sums in the order of :func:`_cost_columns`."""
    table = np.array(sums).reshape(-1, 4, *np.shape(sums[0]))
    tokens, seconds, greedy_tokens, greedy_seconds = np.moveaxis(table, 1, 0)
    return ratio(ratio(tokens, seconds), np.nan_to_num(ratio(greedy_tokens, greedy_seconds)))


def _repeats(runs: Sequence[Run]) -> list[int]:
    return sorted({run.repeat for run in runs})


def find_mismatches(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Answers that differ from the first greedy answer to the same prompt, in any mode and repeat."""
    reference = {run.prompt_id: run.answer for run in runs if run.mode == GREEDY and run.repeat == 0}
    found: list[dict[str, object]] = []
    for run in runs:
        wanted = reference[run.prompt_id]
        at = first_mismatch(wanted, run.answer)
        if at is not None:
            tokens = [answer[at] if at < len(answer) else None for answer in (wanted, run.answer)]
            place = {"prompt_id": run.prompt_id, "mode": run.mode, "repeat": run.repeat, "position": at}
            found.append(place | {"reference": tokens[0], "got": tokens[1]})
    return found
