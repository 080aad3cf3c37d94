"""Where the time of a training step goes, beside what the machine could do.

Owns the float32 matmul peak and the parts and operators of one step. It refuses to count anything but matrix products
and attention as work, so that a share of the peak says how much of the time went into them. Its surprising decision:
operations are counted in a pass of their own, because counting slows what it counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from components.modeling.training import Trainer

GIGA = 1e9
MATMUL_SIZES = (512, 1024, 1536, 2048)
REPEATS = 7
OPERATORS = 8
PROFILED_STEPS = 3


@dataclass(frozen=True)
class MatmulPeak:
    """The fastest square product.

    Attributes:
        gflop_per_s: of the best size, by the median of its repeats.
        size: rows and columns.
        repeats: products timed at each size.
    """

    gflop_per_s: float
    size: int
    repeats: int


@dataclass(frozen=True)
class Part:
    """One part of a training step; medians over steps.

    Attributes:
        name: forward (with the making of the batch), backward, update (clipping and optimizer) or step.
        median_ms: wall clock.
        gflop: of matrix products and attention.
        share_of_peak: of :class:`MatmulPeak`, that this part's products reached.
        steps: samples.
    """

    name: str
    median_ms: float
    gflop: float
    share_of_peak: float
    steps: int


@dataclass(frozen=True)
class Operator:
    """One of torch's operators within a training step: ``self_cpu_ms`` per step, and its share of all operators'."""

    name: str
    self_cpu_ms: float
    share: float


def prepare(threads: int) -> None:
    """Compute as the stage `train` does, on so many threads."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def seconds_of(work: Callable[..., object], *arguments: Any) -> float:
    """Wall clock of one call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def matmul_peak() -> MatmulPeak:
    """Time square float32 products on torch's current threads."""
    best = MatmulPeak(0.0, 0, REPEATS)
    for size in MATMUL_SIZES:
        product = partial(torch.mm, torch.randn(size, size), torch.randn(size, size), out=torch.empty(size, size))
        product()  # wakes the threads
        rate = 2 * size**3 / GIGA / statistics.median(seconds_of(product) for _ in range(REPEATS))
        best = max(best, MatmulPeak(rate, size, REPEATS), key=lambda peak: peak.gflop_per_s)
    return best


def _attention(query: Any, key: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, size = query
    return 4 * int(batch * heads * rows * key[2] * size)


def _attention_backward(_: Any, query: Any, key: Any, *__: Any, **___: Any) -> int:
    return _attention(query, key) * 5 // 2  # the scores once more, and gradients of scores, queries, keys and values


# torch's counter knows no attention on processors.
ATTENTION_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_flop(work: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention in ``work``; a product's multiply-add counts two."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FORMULAS) as counter:
        work()
    return int(counter.get_total_flops())


def step_parts(trainer: Trainer, batches: Sequence[Sequence[int]], peak: MatmulPeak) -> list[Part]:
    """Time whole steps of a real trainer, its parts apart; the trainer's head learns from them.

    Args:
        trainer: as the stage makes it.
        batches: indices of each step's sequences; the first step warms up and is not counted.
        peak: what shares are of.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "update", "step")}
    flop: dict[str, list[int]] = {name: [] for name in seconds}
    for chosen in batches:
        step = _Step(trainer, chosen)
        parts = {"forward": step.forward, "backward": step.backward, "update": trainer.update}
        counted = {name: 0 if name == "update" else count_flop(part) for name, part in parts.items()}
        spent = {name: seconds_of(part) for name, part in parts.items()}
        for name in parts:
            seconds[name].append(spent[name])
            flop[name].append(counted[name])
        seconds["step"].append(sum(spent.values()))
        flop["step"].append(sum(counted.values()))
    return [_part(name, seconds[name][1:], flop[name][1:], peak) for name in seconds]


class _Step:
    """One step whose parts can be called apart, and again."""

    def __init__(self, trainer: Trainer, chosen: Sequence[int]) -> None:
        self.trainer, self.chosen, self.loss = trainer, chosen, torch.zeros(())

    def forward(self) -> None:
        self.loss = self.trainer.forward(self.chosen)[0].loss

    def backward(self) -> None:
        self.trainer.backward(self.loss)


def _part(name: str, seconds: Sequence[float], flop: Sequence[int], peak: MatmulPeak) -> Part:
    rates = [count / GIGA / spent for count, spent in zip(flop, seconds, strict=True)]
    return Part(
        name=name,
        median_ms=1e3 * statistics.median(seconds),
        gflop=statistics.median(flop) / GIGA,
        share_of_peak=statistics.median(rates) / peak.gflop_per_s,
        steps=len(seconds),
    )


def step_operators(trainer: Trainer, batches: Sequence[Sequence[int]]) -> list[Operator]:
    """The operators that most of a training step's time went into, by torch's profiler; the dearest first."""
    batches = batches[:PROFILED_STEPS]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for chosen in batches:
            trainer.backward(trainer.forward(chosen)[0].loss)
            trainer.update()
    averages = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in averages)
    scale = 1e-3 / len(batches)  # microseconds of all steps -> milliseconds of one
    return [
        Operator(event.key, event.self_cpu_time_total * scale, event.self_cpu_time_total / total)
        for event in averages[:OPERATORS]
    ]
