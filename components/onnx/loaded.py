"""A loaded bundle: from a task and some text to an answer.

Owns the way from slots to token ids, the stop rule, and the choice of drafter. It refuses prompts that the buffers
cannot hold together with the whole token budget. Its surprising decision: an answer that was started makes every
earlier one of the same bundle stale, since all share one set of buffers; a stale answer fails loudly when continued.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from components.core.errors import UserError
from components.core.manifest import DraftPolicy, Manifest, TaskPrompt
from components.data.template import control_tokens, encode_prompt, fill_slots
from components.decoding.drafting import PolicyDrafter
from components.decoding.loop import GREEDY, Drafter, Rule, decode_with_drafts
from components.decoding.stopping import Answer, StopRule
from components.onnx.generation import Generation

if TYPE_CHECKING:
    from components.onnx.runtime import OrtBackbone, OrtHead


@dataclass
class Bundle:
    """A loaded bundle; one answer at a time.

    Attributes:
        folder: where it lies.
        sha256: its identity.
        threads: intra-op threads of both sessions.
        lock: hold it around an answer when several threads share the bundle.
    """

    folder: Path
    sha256: str
    manifest: Manifest
    tokenizer: Tokenizer
    backbone: OrtBackbone
    head: OrtHead
    threads: int
    lock: threading.Lock
    _generations: int = 0

    def decode(self, tokens: Sequence[int]) -> str:
        """Token ids to text, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def task(self, name: str) -> TaskPrompt:
        """Prompt of a task.

        Raises:
            UserError: the bundle has no such task.
        """
        if name not in self.manifest.tasks:
            known = ", ".join(self.manifest.tasks)
            raise UserError(f"this bundle has no task {name!r}", f"tasks: {known}", "choose one of them")
        return self.manifest.tasks[name]

    def answer(self, task: str) -> Answer:
        """An empty answer under the task's stop rule."""
        prompt = self.task(task)
        eos_ids = frozenset(self.manifest.backbone.eos_ids)
        return Answer(StopRule(eos_ids, prompt.stop_texts, prompt.max_new_tokens), self.decode)

    def opening(self, task: str, slots: Mapping[str, str]) -> str:
        """What the answer is given to begin with, "" for most tasks; it is part of the prompt, not of what is decoded.

        Raises:
            UserError: unknown task, or empty slot.
        """
        return fill_slots(self.task(task).answer_prefix, slots, control_tokens(self.tokenizer))

    def drafter(self, policy: DraftPolicy | None = None) -> PolicyDrafter:
        """The head under ``policy``, or under the bundle's own."""
        return PolicyDrafter(self.head, policy or self.manifest.policies.policy, self.manifest.backbone.eos_ids)

    def start(self, task: str, slots: Mapping[str, str], draft: bool = True, rule: Rule = GREEDY) -> Generation:
        """Begin an answer; nothing runs before the first round is asked for.

        Args:
            task: a task of the bundle.
            slots: text for the slots of its prompt.
            draft: False decodes with the backbone alone.
            rule: how tokens are chosen.

        Raises:
            UserError: unknown task, empty slot, or a text that does not fit.
        """
        prompt = encode_prompt(self.tokenizer, self.task(task).rendered, slots)
        return self.start_from_ids(prompt, self.answer(task), self.drafter() if draft else None, rule=rule)

    def start_from_ids(
        self,
        prompt: list[int],
        answer: Answer,
        drafter: Drafter | None,
        draft_length: int | None = None,
        rule: Rule = GREEDY,
        rewind: bool = False,
    ) -> Generation:
        """Begin an answer to token ids, with any drafter, or plainly with none; ``rewind`` as the loop has it.

        Raises:
            UserError: prompt and token budget do not fit into the buffers together.
        """
        self._check_room(prompt, answer)
        self._generations += 1
        mine = self._generations
        length = draft_length or self.manifest.policies.policy.longest
        source = decode_with_drafts(self.backbone, drafter, prompt, answer, length, rule, rewind)
        return Generation(prompt, answer, source, lambda: self._generations == mine)

    def complete(self, task: str, slots: Mapping[str, str], draft: bool = True, rule: Rule = GREEDY) -> Generation:
        """A whole answer; safe to call from several threads."""
        with self.lock:
            return self.start(task, slots, draft, rule).finish()

    def _check_room(self, prompt: list[int], answer: Answer) -> None:
        budget = answer.rule.max_new_tokens
        if len(prompt) + budget - 1 > self.manifest.max_length:  # the last token is never processed
            raise UserError(
                "the prompt is too long for this bundle",
                f"{len(prompt)} prompt tokens and {budget} new ones for {self.manifest.max_length} rows",
                "shorten the text, or raise runtime.max_length and run `mtp repro export`",
            )
