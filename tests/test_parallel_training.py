"""Training in several processes: the same curve as one, decisions made alike, and no hang when one dies.

The language model is a table of random embeddings and the states are made up: what is tested is how processes share a
batch, and so they need not load a backbone each.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.core.config import Head, Train
from components.core.errors import UserError
from components.core.manifest import BackboneCard
from components.modeling import parallel_training, training
from components.modeling.backbone import Backbone
from components.modeling.features import Sequence as Captured
from components.modeling.parallel_training import World, run_together
from components.modeling.training import JUDGE, Trainer, new_head

VOCABULARY, WIDTH, KV_HEADS, HEAD_DIM = 60, 32, 1, 16
SETTINGS = Train(
    seed=1,
    draft_length=3,
    step_weights=(0.5, 0.3, 0.2),
    soft_target_weight=0.5,
    epochs=9,
    batch_sequences=9,
    learning_rate=0.003,
    warmup_share=0.05,
    weight_decay=0.01,
    clip_norm=1.0,
    validate_prompts_per_task=1,
    patience=7,
    processes=2,
)
CARD = BackboneCard(
    source="made up",
    weights_sha256="0" * 64,
    model_type="llama",
    layers=2,
    hidden_size=WIDTH,
    query_heads=2,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=VOCABULARY,
    eos_ids=(2,),
)


def made_up_backbone() -> Backbone:
    table = torch.nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
    table.weight.normal_(generator=torch.Generator().manual_seed(3))
    model = SimpleNamespace(get_input_embeddings=lambda: table, get_output_embeddings=lambda: table)
    return Backbone(model, CARD, 1.0, 10_000.0, 1e-5)


def made_up_sequence(number: int, answer_tokens: int) -> Captured:
    generator = torch.Generator().manual_seed(number)
    rows = 4 + answer_tokens - 1
    tokens = torch.randint(3, VOCABULARY, (rows + 1,), generator=generator).tolist()
    hidden = torch.randn(rows, WIDTH, generator=generator)
    cached = torch.randn(2, 2, KV_HEADS, rows, HEAD_DIM, generator=generator)
    return Captured(f"p{number}", tuple(tokens[:4]), tuple(tokens[4:]), "eos", "", hidden, cached)


def made_up_sequences() -> list[Captured]:
    """28 answers of 1 to 55 tokens: batches of 9, 9, 9 and 1, so that one process goes without; one of them has NaN."""
    sequences = [made_up_sequence(number, 1 + 2 * number) for number in range(28)]
    sequences[10].hidden[-2] = float("nan")
    return sequences


def train_and_tell(world: World, folder: Path) -> None:
    """What every process runs: each writes its own result, the one that leads every step's figures too."""
    torch.set_num_threads(1)
    training.LOG_EVERY_STEPS = 1
    backbone, sequences = made_up_backbone(), made_up_sequences()
    head = new_head(Head(kv_layers=(0, 1), intermediate_size=48, draft_vocabulary_size=50), backbone, sequences, 1)
    told: list[Any] = []

    def validate(_: Any) -> dict[str, float]:
        assert world.leads
        told.append(None)
        return {JUDGE: 1.0 / len(told)}

    curve: list[dict[str, float]] = []

    def log(_: int, figures: dict[str, float]) -> None:
        assert world.leads
        curve.append(figures)

    result = Trainer(head, backbone, sequences, SETTINGS, folder, world).run(validate, log)
    weights = {name: tensor.tolist() for name, tensor in head.state_dict().items()}
    document = {"result": asdict(result), "curve": curve, "weights": weights}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process tells, and the two of a pair."""
    alone, pair = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("pair")
    kept = training.LOG_EVERY_STEPS
    train_and_tell(World(), alone)
    training.LOG_EVERY_STEPS = kept
    run_together(train_and_tell, 2, pair)
    files = {"alone": alone / "rank-0.json", "leader": pair / "rank-0.json", "other": pair / "rank-1.json"}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def test_two_processes_draw_the_curve_of_one(documents: dict[str, Any]) -> None:
    alone, pair = documents["alone"]["curve"], documents["leader"]["curve"]
    steps = [(one, two) for one, two in zip(alone, pair, strict=True) if "train/loss" in one]
    finite = [(one, two) for one, two in steps if one["train/loss"] == one["train/loss"]]
    assert len(finite) >= 20
    for one, two in steps:
        assert two == pytest.approx(one, abs=1e-4, nan_ok=True)
    for name, weight in documents["alone"]["weights"].items():
        torch.testing.assert_close(
            torch.tensor(documents["leader"]["weights"][name]), torch.tensor(weight), rtol=0, atol=1e-4
        )


def test_both_processes_decide_alike(documents: dict[str, Any]) -> None:
    """NaN lies in one process's share, only the leader validates: both skip, and both stop."""
    leader, other = documents["leader"], documents["other"]
    assert other["weights"] == leader["weights"] and other["result"] == leader["result"]
    result = leader["result"]
    assert (result["best_epoch"], result["stopped_early"], result["steps"]) == (1, True, 4 * 8)
    assert result["skipped_batches"] == documents["alone"]["result"]["skipped_batches"] == 8


def die(world: World) -> None:
    if not world.leads:
        os.kill(os.getpid(), signal.SIGKILL)
    world.add_up(torch.ones(1))


def refuse(world: World) -> None:
    raise UserError("what is wrong", "what was seen", "what to type")


def fail(world: World) -> None:
    if not world.leads:
        raise ValueError("a bug of rank 1")
    world.told(lambda: None)


def test_a_killed_process_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_training, "GRACE_S", 5.0)
    started = time.monotonic()
    with pytest.raises(UserError, match="2 training processes was killed") as error:
        run_together(die, 2)
    assert "SIGKILL" in error.value.seen
    assert time.monotonic() - started < 60, "nobody waits for the dead"


def test_a_fault_of_the_user_is_told_once_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_training, "GRACE_S", 5.0)
    with pytest.raises(UserError, match="what is wrong"):
        run_together(refuse, 2)
    with pytest.raises(RuntimeError, match="ValueError: a bug of rank 1"):
        run_together(fail, 2)
