"""Where the time goes: counted operations are the ones that the shapes give, and every figure names its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from components.core import paths
from components.core.config import Head
from components.core.errors import UserError
from components.core.files import write_json
from components.core.manifest import TaskPrompt
from components.core.params import Params, load_params
from components.data.table import Prompt, write_prompts
from components.modeling import throughput as measuring
from components.modeling.answers import collect_answers, write_table
from components.modeling.backbone import load_backbone
from components.modeling.batches import collate
from components.modeling.chunks import make_chunks
from components.modeling.distill import ChunkDecoder
from components.modeling.distillation_cost import capture_cost, distillation_cost
from components.modeling.features import read_shards, write_shard
from components.modeling.packed import ATTENTION
from components.modeling.parallel_training import World
from components.modeling.throughput import MatmulPeak, count_flop, matmul_peak, step_operators, step_parts
from components.modeling.training import Trainer, new_head
from pipelines import throughput

ROOT = Path(__file__).resolve().parent.parent
SHAPE = Head(kv_layers=(1, 2), intermediate_size=96, draft_vocabulary_size=200)
MEASURED = {"answer_tokens": 300, "computed_tokens": 500, "wall_s": 2.0, "answer_tokens_per_s": 150.0, "processes": 2}


@pytest.fixture(scope="module")
def project(tiny_backbone_dir: Path, decode: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command reads, made small."""
    folder = tmp_path_factory.mktemp("project")
    ids = [torch.randint(3, 300, (4 + i % 5,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(12)]
    prompts = [Prompt(f"p{i:02d}", "t", "train", "", {}, "", tuple(one)) for i, one in enumerate(ids)]
    task = TaskPrompt(rendered="{text}", stop_texts=(), max_new_tokens=9)
    decoder = ChunkDecoder(load_backbone(tiny_backbone_dir, ATTENTION), SHAPE.kv_layers, decode, 8)
    rows = [(prompt.prompt_id, prompt.task, list(prompt.prompt_ids)) for prompt in prompts]
    for chunk in make_chunks(rows, {"t": task}, 24):
        write_shard(folder / paths.FEATURES, chunk.number, decoder.run(chunk)[0])
    write_table(folder / paths.ANSWERS, collect_answers(prompts, folder / paths.FEATURES))
    write_prompts(folder / paths.PROMPTS, prompts)
    (folder / paths.BACKBONE).parent.mkdir()
    (folder / paths.BACKBONE).symlink_to(tiny_backbone_dir)
    write_json(folder / paths.DISTILLATION_REPORT, {"throughput": MEASURED})
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["head"] = SHAPE.model_dump(mode="json")
    params["train"] |= {"batch_sequences": 4}
    params["runtime"] |= {"threads": 1}
    (folder / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return folder


@pytest.fixture
def params(project: Path) -> Params:
    torch.set_num_threads(1)
    return load_params(project / "params.yaml")


@pytest.fixture
def trainer(project: Path, params: Params, tmp_path: Path) -> Trainer:
    backbone, sequences = (
        load_backbone(project / paths.BACKBONE, ATTENTION),
        list(read_shards(project / paths.FEATURES)),
    )
    head = new_head(params.head, backbone, sequences, 1)
    return Trainer(head, backbone, sequences, params.train, tmp_path, World())


def operations(trainer: Trainer, chosen: list[int]) -> int:
    """Of a forward pass, by hand: linear layers and attention at each anchor, logits, the teacher's logits."""
    head, backbone = trainer.head, trainer.backbone
    batch = collate([trainer.sequences[i] for i in chosen], 3, trainer.vocabulary)
    width, drafts = backbone.card.hidden_size, len(trainer.draft_rows)
    linear = sum(layer.weight.numel() for layer in head.modules() if isinstance(layer, nn.Linear))
    rows, inner = batch.mask.shape[-1], head.config.query_heads * head.config.head_dim
    attention = 2 * rows * inner * len(head.layers)  # scores, and their products with the values
    longest = batch.positions.shape[1]
    anchors = len(chosen) * (longest + longest - 1 + longest - 2)  # an anchor less at each deeper step
    logits = int(batch.supervised().sum()) + batch.states.shape[0] * batch.states.shape[1]
    return 2 * (anchors * (linear + attention) + logits * width * drafts)


def test_counted_operations_are_those_of_the_shapes(trainer: Trainer) -> None:
    chosen = [0, 3, 5]
    loss = torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = trainer.forward(chosen)[0].loss

    counted = count_flop(forward)
    assert counted == operations(trainer, chosen)
    assert 1.5 * counted < count_flop(lambda: trainer.backward(loss)) < 2.5 * counted


def test_parts_and_operators_of_a_step(trainer: Trainer) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}
    parts = step_parts(trainer, [[0, 1], [2, 3], [4, 5]], MatmulPeak(1.0, 64, 3))
    assert [part.name for part in parts] == ["forward", "backward", "update", "step"]
    assert [part.steps for part in parts] == [2] * 4, "the first step warms up"
    *rest, step = parts
    assert step.median_ms == pytest.approx(sum(part.median_ms for part in rest), rel=0.5)
    assert all(part.gflop > 0 and part.share_of_peak > 0 for part in parts if part.name != "update")
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.head.state_dict().items())
    operators = step_operators(trainer, [[0, 1]])
    assert len(operators) == 8 and "aten::mm" in {one.name for one in operators}
    assert [one.share for one in operators] == sorted((one.share for one in operators), reverse=True)
    assert sum(one.share for one in operators) < 1.0


def test_distillation_in_arithmetic(trainer: Trainer) -> None:
    model = trainer.backbone.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, "tied, so counted once"
    cost = distillation_cost(MEASURED, trainer.backbone, MatmulPeak(0.5, 64, 3))
    assert cost.gflop_per_answer_token == pytest.approx(2e-9 * parameters)
    assert cost.answers_share_of_peak == pytest.approx(150 * 2e-9 * parameters / 0.5)
    without_output = parameters - model.get_output_embeddings().weight.numel()
    assert cost.share_of_peak == pytest.approx((150 * parameters + 250 * without_output) * 2e-9 / 0.5)
    capture = capture_cost(trainer, slots=8, passes=3)
    assert (capture.slots, capture.passes) == (8, 3)
    assert 0 < capture.keep_ms < capture.pass_ms and 0 < capture.share < 1


def test_the_command_prints_what_it_writes(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(measuring, "MATMUL_SIZES", (32, 64))
    monkeypatch.setattr(throughput, "STEPS", 2)
    throughput.run_throughput()
    document = json.loads(paths.THROUGHPUT_REPORT.read_text(encoding="utf-8"))
    assert document["created_with"]["threads"] == 1 and document["matmul_peak"]["size"] in (32, 64)
    heading, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert heading.split()[-1] == "source"
    sources = ("median of", "torch.profiler", str(paths.DISTILLATION_REPORT))
    assert len(rows) == 1 + 4 + 8 + 2 + 4
    assert not [row for row in rows if not any(source in row for source in sources)]
    assert f"{document['matmul_peak']['gflop_per_s']:.1f} GFLOP/s" in rows[0]
    assert not list(paths.WORK.glob("*")), "measuring is no training run"


def test_without_data_there_are_three_lines(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((project / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UserError, match="nothing to measure") as error:
        throughput.run_throughput()
    assert len(error.value.render().splitlines()) == 3 and "mtp repro distil" in error.value.do


def test_the_peak_is_the_best_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MATMUL_SIZES", (2, 64))
    assert matmul_peak().size == 64
