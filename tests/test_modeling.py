"""Backbone, head and training, on a tiny random model: exact, resumable, never wired wrong."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.core.config import Head, Package, Train
from components.core.errors import UserError
from components.core.manifest import DraftPolicy, TaskPrompt
from components.decoding.branching import Shape, TreeDrafter
from components.decoding.drafting import PolicyDrafter
from components.decoding.loop import decode_with_drafts
from components.decoding.stopping import Answer, StopRule
from components.modeling import training
from components.modeling.backbone import Backbone, hash_weights, import_backbone, load_backbone
from components.modeling.batches import UNSUPERVISED, batch_order, choose_draft_vocabulary, collate, make_vocabulary
from components.modeling.chunks import make_chunks
from components.modeling.distill import ChunkDecoder
from components.modeling.features import Sequence as Captured
from components.modeling.head import MTPHead
from components.modeling.losses import draft_step_losses
from components.modeling.packed import ATTENTION
from components.modeling.parallel_training import World
from components.modeling.schedule import best_epoch, learning_rate_factor, out_of_patience
from components.modeling.session import TorchBackbone, TorchHead
from components.modeling.training import JUDGE, Trainer, TrainingResult, Validate, new_head

KV_LAYERS = (1, 2)
SHAPE = Head(kv_layers=KV_LAYERS, intermediate_size=96, draft_vocabulary_size=300)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 300, (int(torch.randint(3, 20, (1,), generator=generator)),), generator=generator).tolist()
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def sequences(tiny_backbone_dir: Path, decode: Any) -> list[Captured]:
    task = TaskPrompt(rendered="{text}", stop_texts=(), max_new_tokens=12)
    rows = [(f"p{i:02d}", "t", ids) for i, ids in enumerate(prompts(24))]
    decoder = ChunkDecoder(load_backbone(tiny_backbone_dir, ATTENTION), KV_LAYERS, decode, 8)
    return [sequence for chunk in make_chunks(rows, {"t": task}, 24) for sequence in decoder.run(chunk)[0]]


# --- backbone -------------------------------------------------------------------------------------------------------


def test_a_source_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    for source in ("path:nowhere", "hub:nobody/nothing"):
        with pytest.raises(UserError) as error:
            import_backbone(Package(source=source), tmp_path / "backbone")
        assert len(error.value.render().splitlines()) == 3
        assert not (tmp_path / "backbone").exists()


def test_the_weights_hash_sees_one_changed_number(tiny_backbone_dir: Path) -> None:
    loaded = load_backbone(tiny_backbone_dir)
    assert hash_weights(loaded.model) == loaded.card.weights_sha256
    loaded.model.model.layers[2].mlp.up_proj.weight.data[3, 5] += 1e-6
    assert hash_weights(loaded.model) != loaded.card.weights_sha256


def test_a_damaged_backbone_is_a_user_error(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        load_backbone(tmp_path)
    for file in tiny_backbone_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_backbone(tmp_path)


# --- pairing, masks, losses -----------------------------------------------------------------------------------------


def test_anchors_pair_inputs_and_targets_as_the_contract_says(backbone: Backbone, sequences: list[Captured]) -> None:
    vocabulary = make_vocabulary(range(314), 314)
    batch = collate(sequences[:5], 3, vocabulary)
    for row, sequence in enumerate(sequences[:5]):
        first, answer = len(sequence.prompt) - 1, sequence.answer
        for anchor in range(len(answer) - 1):
            assert int(batch.positions[row, anchor]) == first + anchor
            assert batch.mask[row, 0, anchor].nonzero().flatten().tolist() == list(range(first + anchor + 1))
            for step in range(3):
                target = int(batch.targets[row, anchor, step])
                if anchor + step + 1 < len(answer):
                    assert int(batch.inputs[row, anchor, step]) == answer[anchor + step]
                    assert target == answer[anchor + step + 1]
                    teacher = backbone.output_rows @ batch.states[row, anchor + step + 1]
                    assert int(teacher.argmax()) == target, "the teacher's own choice is the target"
                else:
                    assert target == UNSUPERVISED
        assert bool((batch.targets[row, len(answer) - 1 :] == UNSUPERVISED).all())


def test_states_of_the_prompt_are_not_read(sequences: list[Captured]) -> None:
    """Anchors and teachers begin at row P-1, the state that gave the first answer token."""
    vocabulary = make_vocabulary(range(314), 314)
    without = []
    for sequence in sequences[:5]:
        hidden = sequence.hidden.clone()
        hidden[: len(sequence.prompt) - 1] = float("nan")
        without.append(replace(sequence, hidden=hidden))
    one, two = collate(sequences[:5], 3, vocabulary), collate(without, 3, vocabulary)
    assert torch.equal(one.hidden, two.hidden) and torch.equal(one.states, two.states)
    for row, sequence in enumerate(sequences[:5]):
        count = len(sequence.answer) - 1
        assert torch.equal(one.hidden[row, :count], sequence.hidden[len(sequence.prompt) - 1 :][:count])


def cut(sequence: Captured, tokens: int) -> Captured:
    """The same sequence with so many answer tokens."""
    rows = len(sequence.prompt) + tokens - 1
    kept = {"hidden": sequence.hidden[:rows], "keys_values": sequence.keys_values[..., :rows, :]}
    return replace(sequence, answer=sequence.answer[:tokens], **kept)


def test_padding_adds_nothing_to_any_depth(backbone: Backbone, sequences: list[Captured]) -> None:
    head = new_head(SHAPE, backbone, sequences, seed=0)
    vocabulary = make_vocabulary(head.config.draft_to_target, backbone.card.vocab_size)
    rows = backbone.output_rows[vocabulary.draft_to_target]

    def total(chosen: list[Captured]) -> torch.Tensor:
        batch = collate(chosen, 3, vocabulary)
        counts = batch.supervised().tolist()
        result = draft_step_losses(head, batch, backbone.embed, rows, [1.0, 1.0, 1.0], 0.5, counts)
        return result.losses * batch.supervised()

    # Of one, two and three tokens: at the deeper steps none of their anchors is left.
    short = [cut(sequence, tokens) for sequence, tokens in zip(sequences[6:], (1, 2, 3), strict=False)]
    together = total([*sequences[:6], *short])
    alone = torch.stack([total([sequence]) for sequence in [*sequences[:6], *short]]).sum(dim=0)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_draft_vocabulary_keeps_the_frequent_and_the_end(sequences: list[Captured]) -> None:
    chosen = choose_draft_vocabulary(sequences, 10, 314, [2])
    assert 2 in chosen and len(chosen) == 10 and chosen == sorted(chosen)
    counts = torch.zeros(314)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence.answer), minlength=314)
    assert int(counts.argmax()) in chosen
    assert make_vocabulary(chosen, 314).target_to_draft[chosen[3]] == 3


def test_every_sequence_is_seen_once_an_epoch(sequences: list[Captured]) -> None:
    orders = [batch_order(sequences, 5, seed=1, epoch=epoch) for epoch in (0, 1)]
    for order in orders:
        assert sorted(index for batch in order for index in batch) == list(range(len(sequences)))
    assert orders[0] != orders[1]
    assert orders[0] == batch_order(sequences, 5, seed=1, epoch=0)


def test_the_schedule_warms_up_and_comes_down() -> None:
    factors = [learning_rate_factor(step, 100, 10) for step in range(100)]
    assert factors[0] < factors[5] < factors[9] == 1.0
    assert factors[10] > factors[50] > factors[99] >= 0.1


# --- training -------------------------------------------------------------------------------------------------------

SETTINGS = Train(
    seed=1,
    draft_length=3,
    step_weights=(0.5, 0.3, 0.2),
    soft_target_weight=0.5,
    epochs=60,
    batch_sequences=8,
    learning_rate=0.003,
    warmup_share=0.05,
    weight_decay=0.0,
    clip_norm=1.0,
    validate_prompts_per_task=1,
    patience=60,
    processes=1,
)


def train(
    backbone: Backbone,
    sequences: list[Captured],
    folder: Path,
    validate: Validate = lambda head: {JUDGE: 1.0},
    **changes: Any,
) -> tuple[MTPHead, TrainingResult]:
    settings = SETTINGS.model_copy(update=changes)
    head = new_head(SHAPE, backbone, sequences, settings.seed)
    return head, Trainer(head, backbone, sequences, settings, folder, World()).run(validate, lambda step, figures: None)


def test_an_overfitted_head_drafts_its_training_text_live(
    backbone: Backbone, sequences: list[Captured], decode: Any, tmp_path: Path
) -> None:
    """The whole wiring at once: rows, positions, pairing and feedback must agree between training and decoding."""
    before = hash_weights(backbone.model)
    head, result = train(backbone, sequences, tmp_path)
    assert hash_weights(backbone.model) == before
    assert result.supervised_positions[0] == sum(len(s.answer) - 1 for s in sequences)
    head.eval().save_pretrained(tmp_path / "head")
    session = TorchBackbone(backbone, 64)
    torch_head = TorchHead(MTPHead.from_pretrained(tmp_path / "head"), session)
    path = PolicyDrafter(torch_head, DraftPolicy(longest=3, stop_below=0.0, lookup_ngram=0), ())
    tree = TreeDrafter(torch_head, Shape(nodes=7, depth=3, branches=3), ())
    for drafter, limit in ((path, 3), (tree, 7)):
        emitted = passes = 0
        for sequence in sequences:
            answer = Answer(StopRule(frozenset(backbone.card.eos_ids), (), 12), decode)
            rounds = list(decode_with_drafts(session, drafter, sequence.prompt, answer, limit))
            assert answer.tokens == list(sequence.answer)
            emitted += len(answer.tokens) - 1
            passes += len(rounds) - 1
        assert emitted / passes > 3.0, f"tau {emitted / passes:.2f} of 4 on text the head knows by heart"


class Killed(Exception):
    pass


def fingerprint(head: MTPHead) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in head.state_dict().values())).hexdigest()


def test_the_best_epoch_is_kept_and_the_run_stops_when_none_is_better(
    backbone: Backbone, sequences: list[Captured], tmp_path: Path
) -> None:
    seen: list[str] = []

    def validate(head: MTPHead) -> dict[str, float]:
        seen.append(fingerprint(head))
        return {JUDGE: (0.4, 0.9, 0.9, 0.6, 1.5)[len(seen) - 1]}

    head, result = train(backbone, sequences, tmp_path / "a", validate, epochs=5, patience=2)
    assert (result.best_epoch, result.stopped_early, len(result.validation)) == (3, True, 4)
    assert result.steps == 4 * 3
    assert fingerprint(head) == seen[2], "of equal epochs the later one"
    seen.clear()
    head, result = train(backbone, sequences, tmp_path / "b", validate, epochs=5, patience=3)
    assert (result.best_epoch, result.stopped_early, result.steps) == (5, False, 5 * 3)
    assert fingerprint(head) == seen[4]


def test_patience_counts_epochs_that_are_no_better_than_the_best() -> None:
    assert [best_epoch(figures) for figures in ([0.0], [2.0, 1.0], [2.0, 2.0, 1.0])] == [1, 1, 2]
    assert not out_of_patience([], 1) and not out_of_patience([1.0], 1) and not out_of_patience([1.0, 2.0], 1)
    assert out_of_patience([2.0, 2.0], 1) and not out_of_patience([2.0, 2.0], 2)
    assert out_of_patience([3.0, 1.0, 2.0], 2), "better than the epoch before is not better than the best"
    assert not out_of_patience([1.0, 0.0, 2.0, 1.0], 2)


@pytest.mark.parametrize("stops", [True, False], ids=["stopped early", "to the end"])
def test_a_run_killed_around_every_checkpoint_gives_the_same_bytes(
    backbone: Backbone, sequences: list[Captured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Best weights, moments and figures must belong together whenever a run dies, even before a file is moved."""
    monkeypatch.setattr(training, "CHECKPOINT_EVERY_STEPS", 2)
    curve, figure_of = (0.4, 0.9, 0.9, 0.6, 1.5), dict[str, float]()
    changes = {"epochs": 5, "patience": 2 if stops else 5}

    def first_time(head: MTPHead) -> dict[str, float]:
        figure_of[fingerprint(head)] = curve[len(figure_of)]
        return {JUDGE: curve[len(figure_of) - 1]}

    def again(head: MTPHead) -> dict[str, float]:
        return {JUDGE: figure_of[fingerprint(head)]}  # KeyError: no epoch of the straight run ended with these weights

    straight, expected = train(backbone, sequences, tmp_path / "a", first_time, **changes)
    assert expected.stopped_early is stops
    move, written = os.replace, [True]

    def killed_before_and_after(source: Path, target: Path) -> None:
        written[:] = [not written[0]]
        if written[0]:
            move(source, target)
        raise Killed

    monkeypatch.setattr(os, "replace", killed_before_and_after)
    kills, result = 0, None
    while result is None:
        try:
            resumed, result = train(backbone, sequences, tmp_path / "b", again, **changes)
        except Killed:
            kills += 1
    monkeypatch.undo()
    assert kills >= 2 * len(expected.validation) and result == expected
    for name, head in (("straight", straight), ("resumed", resumed)):
        head.save_pretrained(tmp_path / name)
    assert (tmp_path / "straight/model.safetensors").read_bytes() == (
        tmp_path / "resumed/model.safetensors"
    ).read_bytes()
    assert fingerprint(resumed) == list(figure_of)[expected.best_epoch - 1]


def test_the_same_seed_gives_the_same_file(backbone: Backbone, sequences: list[Captured], tmp_path: Path) -> None:
    for name in ("a", "b"):
        head, _ = train(backbone, sequences, tmp_path / f"work-{name}", epochs=1)
        head.save_pretrained(tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    other, _ = train(backbone, sequences, tmp_path / "work-c", epochs=1, seed=2)
    other.save_pretrained(tmp_path / "c")
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "c/model.safetensors").read_bytes()


def test_batches_without_supervision_or_with_nan_are_skipped_and_counted(
    backbone: Backbone, sequences: list[Captured], tmp_path: Path
) -> None:
    poisoned = [
        Captured(s.prompt_id, s.prompt, s.answer, s.stop_reason, s.text, s.hidden * float("nan"), s.keys_values)
        for s in sequences[:8]
    ]
    _, result = train(backbone, sequences[8:] + poisoned, tmp_path / "a", epochs=1, batch_sequences=1)
    assert result.skipped_batches == 8
    with pytest.raises(UserError, match="learned nothing"):
        train(backbone, poisoned, tmp_path / "b", epochs=1)
    single = [cut(sequence, 1) for sequence in sequences[:2]]
    with pytest.raises(UserError, match="nothing to train on"):
        train(backbone, single, tmp_path / "c", epochs=1)


def test_a_head_with_nan_is_never_saved(backbone: Backbone, tmp_path: Path) -> None:
    head = new_head(SHAPE, backbone, [], seed=0)
    head.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="non-finite"):
        head.save_pretrained(tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_a_layer_that_does_not_exist_is_refused(backbone: Backbone) -> None:
    with pytest.raises(UserError, match="kv_layers"):
        new_head(SHAPE.model_copy(update={"kv_layers": (1, 4)}), backbone, [], seed=0)


def test_a_damaged_head_is_a_user_error(tiny_head_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        MTPHead.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny_head_dir / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(UserError, match="not a whole MTP head"):
        MTPHead.from_pretrained(tmp_path)


# --- the torch session ------------------------------------------------------------------------------------------------


def test_rejected_rows_are_never_seen_again(backbone: Backbone) -> None:
    session = TorchBackbone(backbone, 64)
    token = session.prefill([5, 6, 7])
    session.verify([token, 9, 9, 9])
    session.keep(1)
    assert session.length == 4
    after = session.verify([11])
    clean = TorchBackbone(backbone, 64)
    clean.prefill([5, 6, 7])
    clean.verify([token])
    clean.keep(1)
    assert clean.verify([11]) == after
    torch.testing.assert_close(clean.last_logits, session.last_logits, rtol=1e-5, atol=1e-5)


def test_a_prompt_that_does_not_fit_is_refused(backbone: Backbone) -> None:
    with pytest.raises(UserError, match="too long"):
        TorchBackbone(backbone, 8).prefill(list(range(3, 11)))
