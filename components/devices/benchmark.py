"""How fast? Plain greedy, MTP and prompt lookup, timed in turn on the same prompts in the same process.

Owns the timing plan and its figures. It refuses to time without a warm-up. Its surprising decision: the three modes
are interleaved prompt by prompt in rotating order, and speed-up is the median of the ratios within a repeat, so a
machine that slows down half-way slows all modes alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.core.errors import UserError
from components.core.progress import Progress
from components.decoding.lookup import PromptLookup
from components.decoding.metrics import Acceptance, add_up, count_rounds, echo_rate, first_mismatch, is_looping
from components.devices.verification import PromptRow

if TYPE_CHECKING:
    from components.onnx.generation import Generation
    from components.onnx.runtime import Bundle

GREEDY, MTP, LOOKUP = "greedy", "mtp", "prompt_lookup"
MODES = (GREEDY, MTP, LOOKUP)
COST_REPEATS = 15


@dataclass(frozen=True)
class Plan:
    """What is timed.

    Attributes:
        rounds: times each prompt is timed in each mode.
        warmup_prompts: prompts run in every mode before any is timed.
        lookup_draft_length, lookup_ngram: the prompt-lookup baseline.
    """

    rounds: int
    warmup_prompts: int
    lookup_draft_length: int
    lookup_ngram: int


@dataclass(frozen=True)
class Run:
    """One prompt, timed once in one mode.

    Attributes:
        first_token_s: prefill.
        pass_s: seconds of every later round, drafting included.
    """

    prompt_id: str
    task: str
    mode: str
    repeat: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    first_token_s: float
    pass_s: tuple[float, ...]
    acceptance: Acceptance

    @property
    def decode_s(self) -> float:
        """Seconds after the first token."""
        return sum(self.pass_s)


def run_benchmark(bundle: Bundle, prompts: Sequence[PromptRow], plan: Plan) -> list[Run]:
    """Warm up, then time every prompt in every mode, ``plan.rounds`` times.

    Raises:
        UserError: no prompts or no warm-up.
    """
    if not prompts or plan.warmup_prompts < 1 or plan.rounds < 1:
        seen = f"{len(prompts)} prompts, {plan.warmup_prompts} to warm up, {plan.rounds} rounds"
        raise UserError(
            "a benchmark needs prompts, a warm-up and a round", seen, "correct section benchmark of params.yaml"
        )
    for prompt in prompts[: plan.warmup_prompts]:
        for mode in MODES:
            time_once(bundle, prompt, mode, 0, plan)
    progress = Progress("benchmark", len(prompts) * plan.rounds * len(MODES), "runs")
    runs = []
    for repeat in range(plan.rounds):
        for index, prompt in enumerate(prompts):
            turn = (index + repeat) % len(MODES)
            for mode in (*MODES[turn:], *MODES[:turn]):
                runs.append(time_once(bundle, prompt, mode, repeat, plan))
                progress.advance()
    return runs


def time_once(bundle: Bundle, prompt: PromptRow, mode: str, repeat: int, plan: Plan) -> Run:
    """Time one answer."""
    ids = list(prompt.prompt_ids)
    generation = _start(bundle, prompt.task, ids, mode, plan).finish()
    length = plan.lookup_draft_length if mode == LOOKUP else bundle.manifest.policies.policy.longest
    return Run(
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        mode=mode,
        repeat=repeat,
        prompt=tuple(ids),
        answer=tuple(generation.answer.tokens),
        first_token_s=generation.seconds[0],
        pass_s=tuple(generation.seconds[1:]),
        acceptance=count_rounds(generation.history, length),
    )


def _start(bundle: Bundle, task: str, ids: list[int], mode: str, plan: Plan) -> Generation:
    answer = bundle.answer(task)
    if mode == GREEDY:
        return bundle.start_from_ids(ids, answer, None)
    if mode == MTP:
        return bundle.start_from_ids(ids, answer, bundle.drafter())
    return bundle.start_from_ids(ids, answer, PromptLookup(plan.lookup_ngram), plan.lookup_draft_length)


def measure_costs(bundle: Bundle, prompt: Sequence[int]) -> dict[str, object]:
    """Median milliseconds of passes of 1..K+1 rows and of one step of the head, taken in turn after ``prompt``."""
    backbone, head, length = bundle.backbone, bundle.head, bundle.manifest.policies.policy.longest
    token = backbone.prefill(prompt)
    widths = range(1, length + 2)
    samples: dict[str, list[float]] = {name: [] for name in (*map(str, widths), "draft")}
    for repeat in range(COST_REPEATS + 2):
        for width in widths:
            seconds = _timed(lambda width=width: backbone.verify([token] * width))  # type: ignore[misc]
            if repeat >= 2:
                samples[str(width)].append(seconds)
        head.begin(token)
        for _ in range(length):
            seconds = _timed(head.step)
            if repeat >= 2:
                samples["draft"].append(seconds)
    medians = {name: 1000 * statistics.median(values) for name, values in samples.items()}
    draft_ms = medians.pop("draft")
    return {
        "past_tokens": len(prompt),
        "samples": COST_REPEATS,
        "pass_p50_ms": medians,
        "draft_step_p50_ms": draft_ms,
        "verify_over_decode": medians[str(length + 1)] / medians["1"],
        "draft_step_over_decode": draft_ms / medians["1"],
    }


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def benchmark_rows(
    runs: Sequence[Run], plan: Plan, draft_length: int
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Evidence rows: one per task, and one over all."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    rows = [{"task": task, **_row([run for run in runs if run.task == task], plan, draft_length)} for task in tasks]
    return rows, _row(runs, plan, draft_length)


def _row(runs: Sequence[Run], plan: Plan, draft_length: int) -> dict[str, object]:
    first = [run for run in runs if run.repeat == 0]
    greedy = [run for run in first if run.mode == GREEDY]
    accepted = add_up([run.acceptance for run in first if run.mode == MTP], draft_length)
    looked_up = add_up([run.acceptance for run in first if run.mode == LOOKUP], plan.lookup_draft_length)
    mismatches = find_mismatches(runs)
    differing = {mismatch["prompt_id"] for mismatch in mismatches if mismatch["mode"] == MTP}
    row: dict[str, object] = {
        "prompts": len(greedy),
        "tokens": sum(len(run.answer) for run in greedy),
        "repeats": plan.rounds,
        "exact_match": 1.0 - len(differing) / len(greedy),
        "mismatches": mismatches,
        "acceptance_length": accepted.acceptance_length,
        "extra_tokens_per_pass": max(accepted.acceptance_length - 1.0, 0.0),
        "conditional_acceptance": accepted.conditional,
        "prompt_lookup_acceptance_length": looked_up.acceptance_length,
        "echo_rate": statistics.fmean(echo_rate(run.prompt, run.answer) for run in greedy),
        "loop_share": statistics.fmean(is_looping(run.answer) for run in greedy),
    }
    for mode in MODES:
        row |= _mode_figures([run for run in runs if run.mode == mode], mode)
    for mode, name in ((MTP, "speedup"), (LOOKUP, "prompt_lookup_speedup")):
        row |= _speedup(runs, mode, name, decode_speed)
        row |= _speedup(runs, mode, f"{name}_with_prompt", whole_speed)
    return row


def _mode_figures(runs: Sequence[Run], mode: str) -> dict[str, object]:
    per_repeat = [decode_speed(part) for part in _by_repeat(runs)]
    passes = [seconds for run in runs for seconds in run.pass_s]
    return {
        f"{mode}_tokens_per_s": statistics.median(per_repeat),
        f"{mode}_tokens_per_s_range": [min(per_repeat), max(per_repeat)],
        f"{mode}_tokens_per_s_with_prompt": statistics.median(whole_speed(part) for part in _by_repeat(runs)),
        f"{mode}_first_token_p50_ms": 1000 * statistics.median(run.first_token_s for run in runs),
        f"{mode}_pass_p50_ms": 1000 * statistics.median(passes) if passes else 0.0,
    }


def _speedup(runs: Sequence[Run], mode: str, name: str, speed: Callable[[Sequence[Run]], float]) -> dict[str, object]:
    """Median and range, over repeats, of the mode's speed over greedy's in the same repeat; 0 without greedy speed."""
    ratios = []
    for part in _by_repeat(runs):
        plain = speed([run for run in part if run.mode == GREEDY])
        ratios.append(speed([run for run in part if run.mode == mode]) / plain if plain else 0.0)
    return {name: statistics.median(ratios), f"{name}_range": [min(ratios), max(ratios)]}


def _by_repeat(runs: Sequence[Run]) -> list[list[Run]]:
    return [[run for run in runs if run.repeat == repeat] for repeat in sorted({run.repeat for run in runs})]


def decode_speed(runs: Sequence[Run]) -> float:
    """Tokens after the first per second after the first, pooled over answers; 0 when no answer has a second token."""
    seconds = sum(run.decode_s for run in runs)
    return sum(len(run.answer) - 1 for run in runs) / seconds if seconds else 0.0


def whole_speed(runs: Sequence[Run]) -> float:
    """Tokens per second with prefill, pooled over answers."""
    return sum(len(run.answer) for run in runs) / sum(run.first_token_s + run.decode_s for run in runs)


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
