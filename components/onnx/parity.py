"""Is the bundle the model that was trained? onnxruntime against torch, pass by pass and depth by depth.

Owns the comparison that belongs to the export. It refuses to call two runs alike on text alone: hidden states, logits
and the drafts of every depth are compared, the drafts from the same cache. Its surprising decision: onnxruntime leads
and torch is fed the same tokens, so one near-tie cannot make all that follows incomparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import torch

from components.core.errors import UserError
from components.modeling.session import TorchBackbone, TorchHead
from components.onnx.runtime import OrtBackbone, OrtHead

LARGEST_DIFFERENCE = 5e-3  # float32 rounding over 30 layers gives about 1e-4 at logits of size 20
LARGEST_PROBABILITY_DIFFERENCE = 1e-3
AGREEMENT = 0.99  # near-ties may fall either way, and one may always


@dataclass(frozen=True)
class Parity:
    """What was compared, and how alike it was.

    Attributes:
        prompts: prompts compared.
        positions: rows whose logits and hidden states were compared.
        hidden_difference, logit_difference: largest absolute difference seen.
        argmax_agreement: share of rows with the same best token.
        probability_difference: largest absolute difference between the probabilities of equal drafts.
        drafts_compared: per depth, drafts whose shallower drafts agreed.
        drafts_agreement: per depth, share of those that were equal.
    """

    prompts: int
    positions: int
    hidden_difference: float
    logit_difference: float
    argmax_agreement: float
    probability_difference: float
    drafts_compared: tuple[int, ...]
    drafts_agreement: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether the differences are those of rounding."""
        counts = (
            (self.positions, self.argmax_agreement),
            *zip(self.drafts_compared, self.drafts_agreement, strict=True),
        )
        alike = all(count and count * (1.0 - share) <= max(1.01, count * (1.0 - AGREEMENT)) for count, share in counts)
        near = max(self.hidden_difference, self.logit_difference) <= LARGEST_DIFFERENCE
        return alike and near and self.probability_difference <= LARGEST_PROBABILITY_DIFFERENCE

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON, verdict included."""
        return {**asdict(self), "passed": self.passed}


class _Counts:
    def __init__(self, draft_length: int) -> None:
        self.hidden, self.logits, self.probabilities = [0.0], [0.0], [0.0]
        self.equal: list[bool] = []
        self.compared, self.agreed = [0] * draft_length, [0] * draft_length

    def add_rows(self, ort: OrtBackbone, torch_side: TorchBackbone) -> None:
        """Compare the last pass of both sides."""
        self.hidden.append(float(np.abs(ort.pass_hidden - torch_side.hidden[0].numpy()).max()))
        logits = torch_side.last_logits.numpy()
        self.logits.append(float(np.abs(ort.last_logits - logits).max()))
        self.equal += list(ort.last_logits.argmax(axis=-1) == logits.argmax(axis=-1))

    def add_drafts(self, ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]]) -> None:
        """Compare drafts up to the first that differs: what follows it had another input."""
        for depth, ((left, ours_p), (right, theirs_p)) in enumerate(zip(ours, theirs, strict=True)):
            self.compared[depth] += 1
            self.agreed[depth] += left == right
            if left != right:
                break
            self.probabilities.append(abs(ours_p - theirs_p))


def compare_with_torch(
    backbone: OrtBackbone, head: OrtHead, torch_backbone: TorchBackbone, torch_head: TorchHead,
    prompts: Sequence[Sequence[int]], draft_length: int, rounds: int,
) -> Parity:  # fmt: skip
    """Run both sides over the same tokens.

    Args:
        backbone, head: the bundle.
        torch_backbone, torch_head: the trained parts; their weights are the ones that were exported.
        prompts: token ids.
        draft_length: K.
        rounds: draft-verify rounds after each prompt.

    Raises:
        UserError: there is no prompt.
    """
    if not prompts:
        raise UserError("parity needs at least one test prompt", "0 prompts", "run `mtp repro prompts`")
    counts = _Counts(draft_length)
    for prompt in prompts:
        token = backbone.prefill(prompt)
        torch_backbone.prefill(prompt)
        counts.add_rows(backbone, torch_backbone)
        for _ in range(rounds):
            if backbone.length + draft_length + 1 > backbone.max_length:
                break
            steps = list(islice(head.drafts(token), draft_length))
            counts.add_drafts(steps, torch_drafts(torch_head, backbone, token, draft_length))
            drafts = [draft for draft, _ in steps]
            truth = backbone.verify([token, *drafts])
            torch_backbone.verify([token, *drafts])
            counts.add_rows(backbone, torch_backbone)
            accepted = next((i for i, draft in enumerate(drafts) if draft != truth[i]), draft_length)
            backbone.keep(1 + accepted)
            torch_backbone.keep(1 + accepted)
            token = truth[accepted]
    return Parity(
        prompts=len(prompts),
        positions=len(counts.equal),
        hidden_difference=max(counts.hidden),
        logit_difference=max(counts.logits),
        argmax_agreement=sum(map(bool, counts.equal)) / max(len(counts.equal), 1),
        probability_difference=max(counts.probabilities),
        drafts_compared=tuple(counts.compared),
        drafts_agreement=tuple(a / c if c else 0.0 for a, c in zip(counts.agreed, counts.compared, strict=True)),
    )


def torch_drafts(torch_head: TorchHead, backbone: OrtBackbone, token: int, limit: int) -> list[tuple[int, float]]:
    """Drafts of the torch head from onnxruntime's own cache and hidden state: any difference is the head's."""
    keys_values = []
    for layer in torch_head.head.config.kv_layers:
        keys, values = (
            torch.from_numpy(backbone.buffers[f"past_key_values.{layer}.{part}"][:, :, : backbone.length].copy())
            for part in ("key", "value")
        )
        keys_values.append((keys, values))
    return list(
        islice(torch_head.drafts_from(token, torch.from_numpy(backbone.last_hidden.copy()), keys_values), limit)
    )
