"""Who takes part: the head in its ways, and every baseline trained with the head's settings on the head's answers.

Owns how each trained contender is built. It refuses a baseline another draft vocabulary, other answers or other epochs
than the head had; only the fine-tuned standalone drafters get more. Its surprising decision: weights are kept under
`.work` once trained, so neither a killed comparison nor a changed contest trains twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.baselines.assisted import AssistedGeneration
from components.baselines.contest import Contender, InLoop, InTransformers
from components.baselines.eagle import EagleDrafter, EagleHead, eagle_loss
from components.baselines.medusa import MedusaDrafter, MedusaHeads, medusa_loss
from components.baselines.standalone import StandaloneDrafter, new_standalone, standalone_loss
from components.baselines.training import Fitted, LossOf, fit, fit_once
from components.baselines.ways import Ways
from components.core.config import Compare, Train
from components.core.manifest import Policies
from components.decoding.loop import Drafter
from components.modeling.batches import make_vocabulary
from components.modeling.features import Sequence as Captured
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator

MEDUSA, EAGLE = "medusa", "eagle"
GENERIC, TUNED = "standalone_generic", "standalone_tuned"
ASSISTED_MODEL, ASSISTED_LOOKUP = "transformers_assistant", "transformers_prompt_lookup"


class Roster:
    """Trains and names the contenders.

    Args:
        evaluator: decodes prompts; its session is what drafters look into.
        head: the project's own, already trained.
        sequences: the answers that trained the head, by task.
        train: the head's settings.
        compare: shapes of the baselines.
        folder: keeps finished weights; its name must change with whatever they are made from.
    """

    def __init__(
        self,
        evaluator: LiveEvaluator,
        head: MTPHead,
        sequences: dict[str, list[Captured]],
        train: Train,
        compare: Compare,
        folder: Path,
    ) -> None:
        self.evaluator, self.head, self.by_task = evaluator, head, sequences
        self.settings, self.compare, self.folder = train.model_copy(update={"seed": compare.seed}), compare, folder
        self.backbone, self.session = evaluator.session.backbone, evaluator.session
        self.vocabulary = make_vocabulary(head.config.draft_to_target, self.backbone.card.vocab_size)
        self.draft_rows = self.backbone.output_rows[self.vocabulary.draft_to_target].contiguous()
        self.everything = [sequence for task in sorted(sequences) for sequence in sequences[task]]

    def contenders(self, training_of_head: dict[str, Any], policies: Policies, ngram: int) -> list[Contender]:
        """Everyone, the head first.

        Args:
            training_of_head: what its training cost.
            policies: what calibration chose for the head.
            ngram: of prompt lookup.
        """
        ways = Ways(self.evaluator, self.head, self.compare, policies, self.settings.draft_length)
        generic, tuned, costs = self._standalones()
        lookup = AssistedGeneration(self.backbone, self.evaluator.decode, ngram=ngram)
        assisted = {
            task: AssistedGeneration(self.backbone, self.evaluator.decode, model) for task, model in tuned.items()
        }
        return [
            *ways.with_head({"training": training_of_head, **self._reads_states(self.head)}),
            *ways.without_head(ngram),
            self._medusa(),
            self._eagle(),
            self._standalone(
                GENERIC, "own embedding and cache; all tasks in one", dict.fromkeys(tuned, generic), costs
            ),
            self._standalone(TUNED, "the same, one for each task", tuned, costs),
            self._assisted(ASSISTED_MODEL, f"generate(assistant_model=) with {TUNED}", assisted.__getitem__),
            self._assisted(ASSISTED_LOOKUP, "generate(prompt_lookup_num_tokens=)", lambda _: lookup),
        ]

    def _fit(
        self, name: str, module: nn.Module, sequences: Sequence[Captured], loss: LossOf, epochs: int | None = None
    ) -> Fitted:
        settings = self.settings.model_copy(update={"epochs": epochs or self.settings.epochs})

        def train() -> Fitted:
            return fit(module, sequences, loss, settings, self.vocabulary, name)

        return fit_once(self.folder / f"{name}.safetensors", module, train)

    def _in_loop(self, name: str, about: str, drafter: Drafter, **known: Any) -> Contender:
        way = InLoop(self.evaluator, lambda _: drafter)
        return Contender(name, about, way, self.settings.draft_length, drafter=drafter, **known)

    def _assisted(self, name: str, about: str, generation_of: Callable[[str], AssistedGeneration]) -> Contender:
        return Contender(name, about, InTransformers(self.evaluator, generation_of), self.settings.draft_length)

    def _reads_states(self, module: nn.Module) -> dict[str, Any]:
        """A module that borrows the backbone's embedding and keeps a copy of its output rows."""
        copied = (self.draft_rows, self.vocabulary.draft_to_target)
        return {"parameters": count(module), "weights": tuple(module.parameters()), "copied_rows": copied}

    def _medusa(self) -> Contender:
        torch.manual_seed(self.settings.seed)
        size, length = self.backbone.card.hidden_size, self.settings.draft_length
        heads = MedusaHeads(size, length, self.compare.medusa_blocks)
        loss = medusa_loss(heads, self.draft_rows, self.vocabulary, self.settings)
        fitted = self._fit(MEDUSA, heads, self.everything, loss)
        drafter = MedusaDrafter(heads, self.session, self.draft_rows, self.vocabulary.draft_to_target)
        about = "K residual towers on the last state; no attention"
        return self._in_loop(MEDUSA, about, drafter, training=fitted.as_dict(), **self._reads_states(heads))

    def _eagle(self) -> Contender:
        torch.manual_seed(self.settings.seed)
        eagle = EagleHead(self.head.config)
        loss = eagle_loss(eagle, self.backbone.embed, self.draft_rows, self.vocabulary, self.settings)
        fitted = self._fit(EAGLE, eagle, self.everything, loss)
        drafter = EagleDrafter(eagle, self.session, self.draft_rows, self.vocabulary.draft_to_target)
        about = "the head's layers with keys and values of their own, and a pass over the prompt"
        return self._in_loop(EAGLE, about, drafter, training=fitted.as_dict(), **self._reads_states(eagle))

    def _standalones(self) -> tuple[Any, dict[str, Any], dict[str, dict[str, Any]]]:
        generic = new_standalone(self.compare.standalone, self.backbone.card, self.vocabulary, self.settings.seed)
        loss = standalone_loss(generic, self.draft_rows, self.vocabulary, self.settings, prompts_too=True)
        costs = {GENERIC: self._fit(GENERIC, generic, self.everything, loss).as_dict()}
        tuned = {}
        for task, sequences in self.by_task.items():
            tuned[task] = copy.deepcopy(generic).requires_grad_(True)
            loss = standalone_loss(tuned[task], self.draft_rows, self.vocabulary, self.settings, prompts_too=False)
            name, epochs = f"{TUNED}-{task}", self.compare.finetune_epochs
            costs[name] = self._fit(name, tuned[task], sequences, loss, epochs).as_dict()
        return generic, tuned, costs

    def _standalone(self, name: str, about: str, models: dict[str, Any], costs: dict[str, Any]) -> Contender:
        drafters = {task: StandaloneDrafter(model) for task, model in models.items()}
        weights = {id(weight): weight for model in models.values() for weight in all_tensors(model)}
        one = next(iter(models.values()))
        return Contender(
            name,
            about,
            InLoop(self.evaluator, drafters.__getitem__),
            self.settings.draft_length,
            parameters=count(one),
            weights=tuple(weights.values()),
            drafter=next(iter(drafters.values())),
            training={key: cost for key, cost in costs.items() if key == GENERIC or name == TUNED},
        )


def count(module: nn.Module) -> int:
    """Numbers that training sets."""
    return sum(parameter.numel() for parameter in module.parameters())


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]
