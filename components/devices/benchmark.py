"""How fast? Every mode of decoding, timed in turn on the same prompts in the same process.

Owns the timing plan and the clock; figures are made of its runs in speed.py. It refuses to time without a warm-up. Its
surprising decision: the three modes are interleaved prompt by prompt in rotating order, so a machine that slows down
half-way slows all modes alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from components.core.errors import UserError
from components.core.progress import Progress
from components.decoding.lookup import PromptLookup
from components.decoding.metrics import Acceptance, count_rounds
from components.devices.verification import PromptRow

if TYPE_CHECKING:
    from components.onnx.generation import Generation
    from components.onnx.runtime import Bundle

GREEDY, MTP, LOOKUP = "greedy", "mtp", "prompt_lookup"
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


def timed_modes(bundle: Bundle) -> tuple[str, ...]:
    """Plain decoding, the bundle's default policy, its other policies by name, and prompt lookup."""
    policies = bundle.manifest.policies
    return (GREEDY, MTP, *(mode for mode in policies.modes if mode != policies.default), LOOKUP)


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
    modes = timed_modes(bundle)
    for prompt in prompts[: plan.warmup_prompts]:
        for mode in modes:
            time_once(bundle, prompt, mode, 0, plan)
    progress = Progress("benchmark", len(prompts) * plan.rounds * len(modes), "runs")
    runs = []
    for repeat in range(plan.rounds):
        for index, prompt in enumerate(prompts):
            turn = (index + repeat) % len(modes)
            for mode in (*modes[turn:], *modes[:turn]):
                runs.append(time_once(bundle, prompt, mode, repeat, plan))
                progress.advance()
    return runs


def time_once(bundle: Bundle, prompt: PromptRow, mode: str, repeat: int, plan: Plan) -> Run:
    """Time one answer."""
    ids = list(prompt.prompt_ids)
    generation = _start(bundle, prompt.task, ids, mode, plan).finish()
    return Run(
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        mode=mode,
        repeat=repeat,
        prompt=tuple(ids),
        answer=tuple(generation.answer.tokens),
        first_token_s=generation.seconds[0],
        pass_s=tuple(generation.seconds[1:]),
        acceptance=count_rounds(generation.history),
    )


def _start(bundle: Bundle, task: str, ids: list[int], mode: str, plan: Plan) -> Generation:
    answer = bundle.answer(task)
    if mode == GREEDY:
        return bundle.start_from_ids(ids, answer, None)
    if mode == LOOKUP:
        return bundle.start_from_ids(ids, answer, PromptLookup(plan.lookup_ngram), plan.lookup_draft_length)
    policies = bundle.manifest.policies
    policy = policies.policy if mode == MTP else policies.modes[mode]
    return bundle.start_from_ids(ids, answer, bundle.drafter(policy), policy.longest)


def measure_costs(bundle: Bundle, prompt: Sequence[int]) -> dict[str, object]:
    """Median milliseconds, after ``prompt``, of passes of every width in use and of one step of the head."""
    backbone, head = bundle.backbone, bundle.head
    length = max(policy.longest for policy in bundle.manifest.policies.modes.values())
    token = backbone.prefill(prompt)
    widths = range(1, length + 2)
    samples: dict[str, list[float]] = {name: [] for name in (*map(str, widths), "draft")}
    for repeat in range(COST_REPEATS + 2):
        for width in widths:
            seconds = _timed(lambda width=width: backbone.verify([token] * width))  # type: ignore[misc]
            if repeat >= 2:
                samples[str(width)].append(seconds)
        steps = head.drafts(token)
        for _ in range(length):
            seconds = _timed(partial(next, steps))
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
