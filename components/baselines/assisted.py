"""transformers' own assisted generation, through `generate` and nothing else.

Owns the call and the count of backbone passes by a hook. It refuses to believe what a library says of itself: rounds
are rebuilt from the width of each pass that really happened. Its surprising decision: transformers drafts before its
prompt pass as well, so that pass counts here, and with it the first token; elsewhere neither does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from components.decoding.loop import Round
from components.decoding.stopping import Answer, Decode, StopRule
from components.modeling.backbone import Backbone


@dataclass(frozen=True)
class Pass:
    """One forward pass: rows in the cache before it, tokens given, seconds taken."""

    start: int
    tokens: tuple[int, ...]
    seconds: float


class PassRecorder:
    """Hooks on a transformers decoder that note every pass."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.passes: list[Pass] = []
        self._begun: tuple[int, float] = (0, 0.0)

    def __enter__(self) -> PassRecorder:
        """Start to listen."""
        self._handles = [
            self.decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            self.decoder.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        self._begun = (0 if cache is None else int(cache.get_seq_length()), time.perf_counter())

    def _after(self, _: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        start, began = self._begun
        self.passes.append(Pass(start, tuple(kwargs["input_ids"][0].tolist()), time.perf_counter() - began))


class AnswerEnds(StoppingCriteria):
    """Asks the project's own stop rule, token by token."""

    def __init__(self, rule: StopRule, decode: Decode, prompt_tokens: int) -> None:
        self.rule, self.decode, self.prompt_tokens = rule, decode, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Whether the first answer is finished, [1] bool."""
        answer = cut(input_ids[0, self.prompt_tokens :].tolist(), self.rule, self.decode)
        return torch.tensor([answer.done])


def cut(tokens: Sequence[int], rule: StopRule, decode: Decode) -> Answer:
    """The answer up to the token that ends it: a library stops only after a whole accepted run."""
    answer = Answer(rule, decode)
    for token in tokens:
        if answer.append(token):
            break
    return answer


class AssistedGeneration:
    """`generate` of the backbone, with an assistant model or with prompt lookup.

    Args:
        backbone: the frozen model.
        decode: token ids to text.
        assistant: a transformers model over the same token ids; None looks drafts up in the prompt.
        ngram: longest run of tokens that prompt lookup matches.
    """

    def __init__(self, backbone: Backbone, decode: Decode, assistant: Any = None, ngram: int = 0) -> None:
        self.backbone, self.decode, self.assistant, self.ngram = backbone, decode, assistant, ngram
        self.assistant_passes: list[Pass] = []

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], rule: StopRule, draft_length: int) -> tuple[Answer, list[Round]]:
        """Answer one prompt; rounds as the project's own loop would give them, behind an empty one for its prefill."""
        ids = torch.tensor([list(prompt)])
        config = GenerationConfig(
            max_new_tokens=rule.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(rule.eos_ids) or None,
            pad_token_id=min(rule.eos_ids, default=0),
            **self._lookup(draft_length),
        )
        criteria = StoppingCriteriaList([AnswerEnds(rule, self.decode, len(prompt))])
        with ExitStack() as stack:
            recorded = stack.enter_context(PassRecorder(self.backbone.model.model))
            drafted = stack.enter_context(PassRecorder(self.assistant.model)) if self.assistant else None
            output = self.backbone.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=criteria,
                **self._assistant(draft_length),
            )
        self.assistant_passes = drafted.passes if drafted else []
        tokens = output[0, len(prompt) :].tolist()
        answer = cut(tokens, rule, self.decode)
        return answer, rounds_of(recorded.passes, len(prompt), tokens, len(answer.tokens))

    def _lookup(self, draft_length: int) -> dict[str, Any]:
        if self.assistant is not None:
            return {}
        return {"prompt_lookup_num_tokens": draft_length, "max_matching_ngram_size": self.ngram}

    def _assistant(self, draft_length: int) -> dict[str, Any]:
        if self.assistant is None:
            return {}
        own = self.assistant.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = draft_length, "constant"
        own.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.assistant}


def rounds_of(passes: Sequence[Pass], prompt_tokens: int, tokens: Sequence[int], kept: int) -> list[Round]:
    """Rebuild rounds from passes.

    Args:
        passes: the backbone's, in order.
        prompt_tokens: length of the prompt.
        tokens: all that was generated.
        kept: how many of them belong to the answer.
    """
    rounds, emitted = [Round((), (), 0)], 0
    for index, one in enumerate(passes):
        drafted = one.tokens[prompt_tokens:] if index == 0 else one.tokens[1:]
        following = passes[index + 1].start if index + 1 < len(passes) else prompt_tokens + len(tokens) - 1
        new = tokens[emitted : min(following - prompt_tokens + 1, kept)]
        matched = 0
        while matched < min(len(new), len(drafted)) and new[matched] == drafted[matched]:
            matched += 1
        rounds.append(Round(tuple(new), drafted, matched))
        emitted += len(new)
    return rounds
