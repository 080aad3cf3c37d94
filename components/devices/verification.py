"""Same tokens? Every answer of the bundle with drafts, against one-token-at-a-time greedy decoding of the same bundle.

Owns the comparison inside a bundle; its rows are made as those of torch are. It refuses to report on a bundle that
drafts nothing or has nothing accepted: that is broken wiring, not a slow release. Its surprising decision: a prompt is
processed once, and every mode goes back to its end; `benchmark` is where each mode starts from nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from components.core.errors import UserError
from components.core.progress import Progress
from components.data.template import encode_prompt
from components.decoding.comparison import check_wiring
from components.decoding.metrics import first_mismatch
from components.decoding.outcomes import Outcome, judge, total_acceptance

if TYPE_CHECKING:
    from components.onnx.runtime import Bundle


class PromptRow(Protocol):
    """A row of the prompt table, as far as it is needed here."""

    @property
    def prompt_id(self) -> str:
        """Name of the prompt."""

    @property
    def task(self) -> str:
        """Task of the prompt."""

    @property
    def split(self) -> str:
        """train, validation or test."""

    @property
    def slots(self) -> Mapping[str, str]:
        """Text of the slots."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids, template included."""


Prompt = TypeVar("Prompt", bound=PromptRow)


def first_test_prompts(prompts: Sequence[Prompt], per_task: int) -> list[Prompt]:
    """The first ``per_task`` test prompts of each task, in the order of the table.

    Raises:
        UserError: there is none.
    """
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        if prompt.split == "test" and taken.get(prompt.task, 0) < per_task:
            taken[prompt.task] = taken.get(prompt.task, 0) + 1
            chosen.append(prompt)
    if not chosen:
        raise UserError(
            "there are no test prompts", f"{len(prompts)} prompts of other splits", "run `mtp repro prompts`"
        )
    return chosen


def check_prompt_ids(bundle: Bundle, prompts: Sequence[PromptRow]) -> None:
    """Compare the ids that the bundle makes of each prompt's slots with those of the prompt table.

    Raises:
        UserError: the bundle would prompt otherwise than training did.
    """
    for prompt in prompts:
        ids = encode_prompt(bundle.tokenizer, bundle.task(prompt.task).rendered, prompt.slots)
        at = first_mismatch(prompt.prompt_ids, ids)
        if at is not None:
            raise UserError(
                "the bundle turns a prompt into other tokens than the prompt table",
                f"prompt {prompt.prompt_id} of {prompt.task}, from token {at} on",
                "run `mtp repro export`",
            )


def verify_bundle(bundle: Bundle, prompts: Sequence[PromptRow]) -> dict[str, list[Outcome]]:
    """Decode every prompt plainly and under each of the bundle's policies; outcomes by mode, in order of the prompts.

    Raises:
        UserError: no prompts, or drafts are never proposed or hardly ever accepted.
    """
    if not prompts:
        raise UserError("there are no test prompts to verify", "0 prompts", "run `mtp repro prompts`")
    progress = Progress("verify", len(prompts), "prompts")
    outcomes: dict[str, list[Outcome]] = {mode: [] for mode in bundle.manifest.policies.modes}
    differing = 0
    for prompt in prompts:
        for mode, outcome in check_prompt(bundle, prompt).items():
            outcomes[mode].append(outcome)
            differing += outcome.mismatch is not None
        progress.advance(note=f"{differing} differ")
    for mode, of_mode in outcomes.items():
        total = total_acceptance(of_mode)
        check_wiring(total, total.drafted, f"the bundle, mode {mode}")
    return outcomes


def check_prompt(bundle: Bundle, prompt: PromptRow) -> dict[str, Outcome]:
    """Decode one prompt plainly and with drafts in every mode, and compare."""
    ids = list(prompt.prompt_ids)
    plain = bundle.start_from_ids(ids, bundle.answer(prompt.task), None)
    margins = []
    for _ in plain.rounds():
        best, second = np.partition(bundle.backbone.last_logits[-1], -2)[[-1, -2]]
        margins.append(float(best - second))
    judged = {}
    for mode, policy in bundle.manifest.policies.modes.items():
        drafted = bundle.start_from_ids(
            ids, bundle.answer(prompt.task), bundle.drafter(policy), policy.longest, rewind=True
        ).finish()
        judged[mode] = judge(prompt.prompt_id, prompt.task, ids, plain.answer.tokens, margins, drafted.history)
    return judged
