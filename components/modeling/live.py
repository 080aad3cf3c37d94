"""Live decoding with a head in torch: the only source of acceptance figures during training and evaluation.

Owns drafted runs, one prompt at a time. It refuses to batch: padding must have no chance to change an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from components.core.manifest import DraftPolicy, TaskPrompt
from components.data.table import Prompt
from components.decoding.drafting import PolicyDrafter
from components.decoding.loop import GREEDY, Drafter, Round, Rule, decode_greedy, decode_with_drafts
from components.decoding.metrics import Acceptance, add_up, count_rounds
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone
from components.modeling.head import MTPHead
from components.modeling.session import TorchBackbone, TorchHead, top2_margin


class LiveEvaluator:
    """Decodes prompts with torch, one at a time.

    Args:
        backbone: the frozen model.
        prompts: prompts to choose from; the first ones of each task are used.
        tasks: stop rules.
        decode: token ids to text.
        max_length: rows of the cache.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: Sequence[Prompt],
        tasks: Mapping[str, TaskPrompt],
        decode: Callable[[Sequence[int]], str],
        max_length: int,
    ) -> None:
        self.session = TorchBackbone(backbone, max_length)
        self.prompts, self.tasks, self.decode = list(prompts), tasks, decode

    def chosen(self, limit: int) -> list[Prompt]:
        """The first ``limit`` prompts of each task."""
        return [prompt for task in self.tasks for prompt in [p for p in self.prompts if p.task == task][:limit]]

    def acceptance(self, head: MTPHead, draft_length: int, limit: int) -> dict[str, float]:
        """Extra tokens per pass with fixed K, per task and overall, and conditional acceptance per depth."""
        policy = DraftPolicy(longest=draft_length, stop_below=0.0, lookup_ngram=0)
        drafter = self.drafter(head, policy)
        parts: dict[str, list[Acceptance]] = {}
        for prompt in self.chosen(limit):
            _, rounds = self.drafted(prompt, drafter, draft_length)
            parts.setdefault(prompt.task, []).append(count_rounds(rounds, draft_length))
        figures = {
            f"extra_tokens_per_pass/{task}": add_up(counts, draft_length).acceptance_length - 1
            for task, counts in parts.items()
        }
        overall = add_up([count for counts in parts.values() for count in counts], draft_length)
        figures["extra_tokens_per_pass"] = overall.acceptance_length - 1
        for depth, share in enumerate(overall.conditional, start=1):
            figures[f"conditional_acceptance_depth_{depth}"] = share
        return figures

    def drafter(self, head: MTPHead, policy: DraftPolicy) -> PolicyDrafter:
        """The head on this evaluator's session, under ``policy``."""
        return PolicyDrafter(TorchHead(head, self.session), policy, self.session.backbone.card.eos_ids)

    def drafted(
        self, prompt: Prompt, drafter: Drafter, draft_length: int, rule: Rule = GREEDY, rewind: bool = False
    ) -> tuple[Answer, list[Round]]:
        """Decode with drafts; ``rewind`` as the loop has it."""
        answer = self.new_answer(prompt)
        rounds = decode_with_drafts(self.session, drafter, prompt.prompt_ids, answer, draft_length, rule, rewind)
        return answer, list(rounds)

    def plain(self, prompt: Prompt) -> tuple[Answer, list[float]]:
        """Decode one token at a time; the answer and the top-2 margin of each of its tokens."""
        answer, margins = self.new_answer(prompt), []
        for _ in decode_greedy(self.session, prompt.prompt_ids, answer):
            margins.append(top2_margin(self.session.last_logits[-1]))
        return answer, margins

    def new_answer(self, prompt: Prompt) -> Answer:
        """An empty answer under the stop rule of the prompt's task."""
        task = self.tasks[prompt.task]
        eos_ids = frozenset(self.session.backbone.card.eos_ids)
        return Answer(StopRule(eos_ids, tuple(task.stop_texts), task.max_new_tokens), self.decode)
