"""The recipe study on a tiny random model: one change at a time, the same judges, nothing trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from components.core import paths
from components.core.errors import UserError
from components.core.manifest import TaskPrompt
from components.core.params import load_params
from components.data.table import Prompt, write_prompts, write_templates
from components.modeling import study as parts
from components.modeling.answers import collect_answers, write_table
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.chunks import make_chunks
from components.modeling.distill import ChunkDecoder
from components.modeling.features import Sequence as Captured
from components.modeling.features import write_shard
from components.modeling.packed import ATTENTION
from pipelines.study import read_plan, run_study

ROOT = Path(__file__).resolve().parent.parent
TASKS = {name: TaskPrompt(rendered="{text}", stop_texts=(), max_new_tokens=8) for name in ("one", "two")}


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(16):
        ids = tuple(torch.randint(3, 300, (6 + index % 5,), generator=generator).tolist())
        task = ("one", "two")[index % 2]
        made.append(Prompt(f"p{index:02d}", task, "train", f"g{index}", {"text": str(index)}, str(index), ids))
    return made


def answered(folder: Path, decode: Any, layers: tuple[int, ...]) -> dict[str, list[Captured]]:
    decoder = ChunkDecoder(load_backbone(folder, ATTENTION), layers, decode, 8)
    rows = [(one.prompt_id, one.task, list(one.prompt_ids)) for one in prompts()]
    found: dict[str, list[Captured]] = {}
    for chunk, task in zip(make_chunks(rows, TASKS, 16), TASKS, strict=True):
        found[task] = decoder.run(chunk)[0]
    return found


@pytest.fixture(scope="module")
def by_task(tiny_backbone_dir: Path, decode: Any) -> dict[str, list[Captured]]:
    torch.set_num_threads(1)
    return answered(tiny_backbone_dir, decode, (1, 2))


def plan(**variants: dict[str, Any]) -> parts.StudyPlan:
    return parts.StudyPlan(held_out_per_task=2, draft_length=3, base={"train.epochs": 1}, variants=variants)


def test_a_variant_differs_from_the_base_by_its_change_alone() -> None:
    params = load_params(ROOT / "params.yaml")
    base, other = parts.make_variants(plan(a={}, b={"head.kv_layers": [3], "share": 0.5}), params.head, params.train)
    assert (base.head, base.train) == (params.head, params.train.model_copy(update={"epochs": 1}))
    assert (other.head, other.train, other.share) == (
        params.head.model_copy(update={"kv_layers": (3,)}),
        base.train,
        0.5,
    )


@pytest.mark.parametrize("change", [{"gates.x": 1}, {"head.unknown": 1}, {"train.epochs": 0}, {"train": 3}])
def test_what_is_no_setting_of_head_or_training_is_refused(change: dict[str, Any]) -> None:
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(UserError, match="variant odd"):
        parts.make_variants(plan(odd=change), params.head, params.train)


def test_judges_never_train_and_shares_are_nested(by_task: dict[str, list[Captured]]) -> None:
    whole, judges = parts.split_answers(by_task, 2, 1.0)
    half, same = parts.split_answers(by_task, 2, 0.5)
    for task in by_task:
        names = [one.prompt_id for one in whole[task]]
        assert {one.prompt_id for one in judges[task]}.isdisjoint(names)
        assert [one.prompt_id for one in judges[task]] == [one.prompt_id for one in same[task]]
        assert [one.prompt_id for one in half[task]] == names[: len(half[task])]
        assert len(half[task]) == round(len(names) / 2)


def test_other_layers_are_captured_as_decoding_had_them(
    by_task: dict[str, list[Captured]], backbone: Backbone, tiny_backbone_dir: Path, decode: Any
) -> None:
    wanted = answered(tiny_backbone_dir, decode, (0, 3))
    for one, other in zip(by_task["one"], wanted["one"], strict=True):
        torch.testing.assert_close(parts.capture_layers(backbone, one, (0, 3)).keys_values, other.keys_values)
        seen = parts.reading(other, (0, 3), (3, 0)).keys_values
        assert torch.equal(seen, other.keys_values.flip(0))


@pytest.fixture
def project(by_task: dict[str, list[Captured]], tiny_backbone_dir: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["head"] |= {"kv_layers": [1, 2], "intermediate_size": 96, "draft_vocabulary_size": 200}
    params["runtime"] |= {"threads": 1}
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    write_prompts(paths.PROMPTS, prompts())
    write_templates(paths.TEMPLATES, TASKS)
    paths.FEATURES.mkdir(parents=True)
    for number, sequences in enumerate(by_task.values()):
        write_shard(paths.FEATURES, number, sequences)
    table = collect_answers(prompts(), paths.FEATURES)
    write_table(paths.ANSWERS, table.assign(looping=False))
    paths.BACKBONE.parent.mkdir()
    paths.BACKBONE.symlink_to(tiny_backbone_dir)
    return tmp_path


def test_a_study_grows_and_trains_nothing_twice(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "study.yaml"
    file.write_text(json.dumps(plan(base={}, deep={"head.kv_layers": [0, 3]}).model_dump()), encoding="utf-8")
    run_study(file)
    first = json.loads(paths.STUDY_REPORT.read_text(encoding="utf-8"))
    assert [row["name"] for row in first["rows"]] == ["base", "deep"]
    for row in first["rows"]:
        assert row["overall"]["prompts"] == 4
        assert row["overall"]["extra_tokens_per_pass"] >= 0
    file.write_text(json.dumps(plan(base={}, deep={"head.kv_layers": [0, 3]}, half={"share": 0.5}).model_dump()))
    capsys.readouterr()
    run_study(file)
    out = capsys.readouterr().out
    assert "study: half" in out
    assert "study: base" not in out
    later = json.loads(paths.STUDY_REPORT.read_text(encoding="utf-8"))
    assert later["rows"][:2] == first["rows"]
    assert [row["sequences"] for row in later["rows"]] == [12, 12, 6]
    file.write_text(json.dumps(plan(alone={"share": 0.5, "train.seed": 7}).model_dump()))
    run_study(file)
    alone = json.loads(paths.STUDY_REPORT.read_text(encoding="utf-8"))["rows"][-1]
    assert alone["sequences"] == 6, "a share of a share was taken"


def test_a_file_that_is_no_study_gets_three_lines(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    for text in ("a: [", "variants: {}"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as error:
            read_plan(file)
        assert len(error.value.render().splitlines()) == 3
    with pytest.raises(UserError):
        read_plan(tmp_path)


def test_the_studies_that_are_kept_are_valid() -> None:
    params = load_params(ROOT / "params.yaml")
    for file in sorted((ROOT / "docs").glob("study*.yaml")):
        assert parts.make_variants(read_plan(file), params.head, params.train)
