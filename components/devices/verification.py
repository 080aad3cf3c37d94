"""Same tokens? Every answer of the bundle with drafts, against one-token-at-a-time greedy decoding of the same bundle.

Owns the verdict and the live acceptance figures that go with it. It refuses to report on a bundle that drafts nothing
or has nothing accepted: that is broken wiring, not a slow release. Its surprising decision: both modes prefill anew for
each prompt, so nothing that one leaves in the buffers can help the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from components.core.errors import UserError
from components.core.progress import Progress
from components.data.template import encode_prompt
from components.decoding.comparison import Mismatch, check_wiring, find_mismatch
from components.decoding.loop import Round
from components.decoding.metrics import Acceptance, add_up, count_rounds, first_mismatch, is_looping

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


@dataclass(frozen=True)
class Checked:
    """One prompt in both modes."""

    task: str
    tokens: int
    acceptance: Acceptance
    drafted: int
    looping: bool
    mismatch: Mismatch | None


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


def verify_bundle(bundle: Bundle, prompts: Sequence[PromptRow]) -> list[Checked]:
    """Decode every prompt in both modes.

    Raises:
        UserError: no prompts, or drafts are never proposed or hardly ever accepted.
    """
    if not prompts:
        raise UserError("there are no test prompts to verify", "0 prompts", "run `mtp repro prompts`")
    progress = Progress("verify", len(prompts), "prompts")
    checked = []
    for prompt in prompts:
        checked.append(check_prompt(bundle, prompt))
        progress.advance(note=f"{sum(one.mismatch is not None for one in checked)} differ")
    total = add_up([one.acceptance for one in checked], bundle.manifest.policies.policy.longest)
    check_wiring(total, sum(one.drafted for one in checked), "the bundle")
    return checked


def check_prompt(bundle: Bundle, prompt: PromptRow) -> Checked:
    """Decode one prompt plainly and with drafts, and compare."""
    ids = list(prompt.prompt_ids)
    plain = bundle.start_from_ids(ids, bundle.answer(prompt.task), None)
    margins = []
    for _ in plain.rounds():
        best, second = np.partition(bundle.backbone.last_logits[-1], -2)[[-1, -2]]
        margins.append(float(best - second))
    drafted = bundle.start_from_ids(ids, bundle.answer(prompt.task), bundle.drafter()).finish()
    got = drafted.answer.tokens
    mismatch = find_mismatch(prompt.prompt_id, plain.answer.tokens, got, margins)
    acceptance = count_rounds(drafted.history, bundle.manifest.policies.policy.longest)
    return Checked(prompt.task, len(got), acceptance, count_drafted(drafted.history), is_looping(got), mismatch)


def count_drafted(rounds: Sequence[Round]) -> int:
    """Drafts proposed in all rounds."""
    return sum(len(round_.drafted) for round_ in rounds)


def verification_rows(
    checked: Sequence[Checked], draft_length: int
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Evidence rows: one per task, and one over all."""
    tasks = list(dict.fromkeys(one.task for one in checked))
    rows = [{"task": task, **_row([one for one in checked if one.task == task], draft_length)} for task in tasks]
    return rows, _row(checked, draft_length)


def _row(checked: Sequence[Checked], draft_length: int) -> dict[str, object]:
    total = add_up([one.acceptance for one in checked], draft_length)
    calm = add_up([one.acceptance for one in checked if not one.looping], draft_length)
    mismatches = [asdict(one.mismatch) for one in checked if one.mismatch]
    return {
        "prompts": len(checked),
        "tokens": sum(one.tokens for one in checked),
        "exact_match": 1.0 - len(mismatches) / len(checked),
        "mismatches": mismatches,
        "acceptance_length": total.acceptance_length,
        "extra_tokens_per_pass": max(total.acceptance_length - 1.0, 0.0),
        "conditional_acceptance": total.conditional,
        "loop_share": sum(one.looping for one in checked) / len(checked),
        "extra_tokens_per_pass_without_loops": max(calm.acceptance_length - 1.0, 0.0),
        "drafts_proposed": sum(one.drafted for one in checked),
    }
