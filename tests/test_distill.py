"""Distillation on a tiny random model: the texts of single decoding, every row captured, resumable, same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from components.core import paths
from components.core.config import Distil
from components.core.errors import UserError
from components.core.manifest import TaskPrompt
from components.data.table import Prompt, write_prompts, write_templates
from components.decoding.comparison import Mismatch
from components.decoding.loop import decode_greedy
from components.decoding.stopping import Answer, StopRule
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.chunks import Chunk, make_chunks, shared_tokens
from components.modeling.distill import ChunkDecoder, Work, distil_chunks
from components.modeling.equality import Equality, compare_with_single
from components.modeling.features import Sequence as Captured
from components.modeling.features import read_shards, shard_path
from components.modeling.packed import ATTENTION, PackedPass, SlotRows
from components.modeling.session import TorchBackbone
from pipelines.stages import distil as stage

KV_LAYERS = (1, 2)
BUDGET = 12
TASK = TaskPrompt(rendered="{text}", stop_texts=(), max_new_tokens=BUDGET)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def packed(tiny_backbone_dir: Path) -> Backbone:
    return load_backbone(tiny_backbone_dir, ATTENTION)


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompts(count: int, prefix: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Prompts of 3 to 19 tokens behind a prefix."""
    return [prefix + random_ids(3 + seed * 7 % 17, seed) for seed in range(count)]


def chunk_of(prompts: Sequence[tuple[int, ...]], task: TaskPrompt = TASK) -> Chunk:
    (chunk,) = make_chunks([(f"p{i:02d}", "t", ids) for i, ids in enumerate(prompts)], {"t": task}, len(prompts))
    return chunk


def single(backbone: Backbone, prompt: Sequence[int], decode: Any, task: TaskPrompt = TASK) -> Answer:
    answer = Answer(StopRule(frozenset(backbone.card.eos_ids), tuple(task.stop_texts), task.max_new_tokens), decode)
    list(decode_greedy(TorchBackbone(backbone, 128), prompt, answer))
    return answer


def assert_as_computed_alone(backbone: Backbone, sequence: Captured) -> None:
    """Every captured row is what one straight pass over prompt and answer gives, with transformers' own attention."""
    session = TorchBackbone(backbone, 128)
    session.prefill([*sequence.prompt, *sequence.answer[:-1]])
    torch.testing.assert_close(sequence.hidden, session.hidden[0], rtol=1e-5, atol=2e-5)
    for row, layer in enumerate(KV_LAYERS):
        cached = session.cache.layers[layer]
        expected = torch.stack((cached.keys[0], cached.values[0]))
        torch.testing.assert_close(sequence.keys_values[row], expected, rtol=1e-5, atol=2e-5)


# --- the same texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4, 32])
def test_answers_and_rows_are_those_of_single_decoding(
    backbone: Backbone, packed: Backbone, decode: Any, slots: int
) -> None:
    asked = prompts(17, random_ids(5, 99))
    sequences, work = ChunkDecoder(packed, KV_LAYERS, decode, slots).run(chunk_of(asked))
    assert sorted(sequence.prompt for sequence in sequences) == sorted(asked)
    for sequence in sequences:
        answer = single(backbone, sequence.prompt, decode)
        assert list(sequence.answer) == answer.tokens
        assert (sequence.stop_reason, sequence.text) == (answer.stop_reason, answer.text())
        assert_as_computed_alone(backbone, sequence)
    assert work.prompts == 17
    assert work.answer_tokens == sum(len(sequence.answer) for sequence in sequences)
    assert work.computed_tokens + work.shared_tokens == sum(len(prompt) for prompt in asked)


def test_rows_of_the_answer_are_what_decoding_shows_the_head(backbone: Backbone, packed: Backbone, decode: Any) -> None:
    (sequence,), _ = ChunkDecoder(packed, KV_LAYERS, decode, 4).run(chunk_of([random_ids(9, 1)]))
    session = TorchBackbone(backbone, 64)
    session.prefill(sequence.prompt)
    hidden = [session.last_hidden[0, 0]]
    for token in sequence.answer[:-1]:
        session.verify([token])
        session.keep(1)
        hidden.append(session.last_hidden[0, 0])
    torch.testing.assert_close(sequence.hidden[8:], torch.stack(hidden), rtol=1e-5, atol=2e-5)


def test_slots_are_refilled_while_others_write(
    packed: Backbone, backbone: Backbone, decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of one chunk end by eos, by a stop text and by length; each free slot is taken at the next pass."""
    steps: list[PackedPass] = []
    run = SlotRows.run
    monkeypatch.setattr(SlotRows, "run", lambda self, model, step: (steps.append(step), run(self, model, step))[1])
    asked = prompts(14)
    free = [single(backbone, prompt, decode).tokens for prompt in asked]
    stop = decode([free[0][3]])
    task = TASK.model_copy(update={"stop_texts": (stop,)})
    card = packed.card.model_copy(update={"eos_ids": (free[1][1], free[2][5])})
    sequences, work = ChunkDecoder(replace(packed, card=card), KV_LAYERS, decode, 3).run(chunk_of(asked, task))
    for sequence in sequences:
        answer = single(replace(backbone, card=card), sequence.prompt, decode, task)
        assert (list(sequence.answer), sequence.stop_reason) == (answer.tokens, answer.stop_reason)
        assert stop not in sequence.text
    assert {sequence.stop_reason for sequence in sequences} == {"eos", "stop_text", "length"}
    assert sum(1 for step in steps if len(step.slots) and step.admissions) >= 3
    for step in steps:
        waited = 14 - sum(len(earlier.admissions) for earlier in steps[: steps.index(step) + 1])
        assert len(step.last) == 3 or waited == 0, "no slot is idle while a prompt waits"
    assert work.passes == len(steps) < sum(len(sequence.answer) for sequence in sequences) / 2


# --- prefixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 8])
def test_shared_prefixes_are_computed_once(backbone: Backbone, packed: Backbone, decode: Any, slots: int) -> None:
    prefix, name = random_ids(20, 50), random_ids(6, 51)
    ends = [(300 + at, *random_ids(3 + at, at)) for at in range(6)]
    asked = [prefix + end for end in ends[:3]] + [prefix + name + end for end in ends[3:]]
    sequences, work = ChunkDecoder(packed, KV_LAYERS, decode, slots).run(chunk_of(asked))
    assert work.computed_tokens == len(prefix) + len(name) + sum(map(len, ends))
    for sequence in sequences:
        assert list(sequence.answer) == single(backbone, sequence.prompt, decode).tokens
        assert_as_computed_alone(backbone, sequence)


def test_a_prompt_that_is_the_prefix_or_comes_twice(backbone: Backbone, packed: Backbone, decode: Any) -> None:
    prefix = random_ids(10, 7)
    asked = [prefix, prefix, (*prefix, 5), (*prefix, 5, 6), prefix[:1]]
    sequences, work = ChunkDecoder(packed, KV_LAYERS, decode, 3).run(chunk_of(asked))
    assert work.computed_tokens == 1 + 9 + 1 + 1 + 1, "the last token of a prompt is always computed"
    for sequence in sequences:
        assert list(sequence.answer) == single(backbone, sequence.prompt, decode).tokens
        assert_as_computed_alone(backbone, sequence)


def test_shared_tokens() -> None:
    assert shared_tokens((1, 2, 3), (1, 2, 4)) == 2
    assert shared_tokens((1, 2), (1, 2, 4)) == shared_tokens((1, 2, 4), (1, 2)) == 2
    assert shared_tokens((), (1,)) == shared_tokens((2,), (1,)) == 0


# --- chunks and shards ------------------------------------------------------------------------------------------------


def test_chunks_are_even_of_one_task_and_depend_on_nothing_else() -> None:
    rows = [(f"p{i}", "ab"[i % 2], ids) for i, ids in enumerate(prompts(22))]
    chunks = make_chunks(rows, {"a": TASK, "b": TASK, "none": TASK}, 4)
    assert chunks == make_chunks(rows[::-1], {"b": TASK, "a": TASK}, 4)
    assert [chunk.number for chunk in chunks] == list(range(6))
    assert sorted(len(chunk.prompts) for chunk in chunks) == [3, 3, 4, 4, 4, 4]
    assert sorted(name for chunk in chunks for name in chunk.prompt_ids) == sorted(name for name, _, _ in rows)


def decode_chunks(chunks: list[Chunk], backbone_dir: Path, folder: Path, processes: int = 1) -> Any:
    return distil_chunks(chunks, backbone_dir, KV_LAYERS, 2, folder, processes)


def test_a_killed_distillation_goes_on_where_it_stopped(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    chunks = make_chunks([(f"p{i}", "t", ids) for i, ids in enumerate(prompts(9))], {"t": TASK}, 3)
    whole = sum(decode_chunks(chunks, tiny_backbone_dir, tmp_path / "whole"), Work())
    assert whole.prompts == 9
    running = decode_chunks(chunks, tiny_backbone_dir, tmp_path / "resumed")
    assert next(running).prompts == 3
    running.close()
    rest = sum(decode_chunks(chunks, tiny_backbone_dir, tmp_path / "resumed"), Work())
    assert rest.prompts == 6 and 0 < rest.answer_tokens < whole.answer_tokens
    for chunk in chunks:
        files = [shard_path(tmp_path / name, chunk.number).read_bytes() for name in ("whole", "resumed")]
        assert files[0] == files[1]
    assert [s.prompt_id for s in read_shards(tmp_path / "whole")] == [n for chunk in chunks for n in chunk.prompt_ids]


def test_processes_do_not_change_the_bytes(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    chunks = make_chunks([(f"p{i}", "t", ids) for i, ids in enumerate(prompts(4))], {"t": TASK}, 2)
    for processes in (1, 2):
        done = list(decode_chunks(chunks, tiny_backbone_dir, tmp_path / str(processes), processes))
        assert [work.prompts for work in done] == [2, 2]
    for chunk in chunks:
        one, two = (shard_path(tmp_path / name, chunk.number).read_bytes() for name in ("1", "2"))
        assert one == two


def test_a_damaged_shard_is_a_user_error(tmp_path: Path) -> None:
    shard_path(tmp_path, 0).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="damaged"):
        list(read_shards(tmp_path))


def test_a_sequence_without_all_its_states_is_refused(packed: Backbone, decode: Any) -> None:
    (sequence,), _ = ChunkDecoder(packed, KV_LAYERS, decode, 1).run(chunk_of([random_ids(4, 3)]))
    with pytest.raises(ValueError, match="states"):
        replace(sequence, hidden=sequence.hidden[-len(sequence.answer) :])


# --- the check against single decoding --------------------------------------------------------------------------------


def test_the_comparison_with_single_decoding_sees_one_wrong_token(
    tiny_backbone_dir: Path, packed: Backbone, decode: Any
) -> None:
    sequences, _ = ChunkDecoder(packed, KV_LAYERS, decode, 4).run(chunk_of(prompts(4)))
    rows = [
        {"prompt_id": s.prompt_id, "task": "t", "prompt_ids": list(s.prompt), "answer_ids": list(s.answer)}
        for s in sequences
    ]
    same = compare_with_single(pd.DataFrame(rows), tiny_backbone_dir, {"t": TASK}, 4, 1)
    assert (same.prompts, same.mismatches) == (4, ())
    assert same.tokens == sum(len(s.answer) for s in sequences) and same.tokens_per_s > 0
    rows[2]["answer_ids"][3] += 1
    wrong = compare_with_single(pd.DataFrame(rows), tiny_backbone_dir, {"t": TASK}, 4, 1)
    (mismatch,) = wrong.mismatches
    assert mismatch.prompt_id == rows[2]["prompt_id"] and mismatch.top2_margin > 0


# --- the stage --------------------------------------------------------------------------------------------------------


def test_the_stage_reports_its_work_and_its_speed(
    tiny_backbone_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dvc.yaml", "params.yaml"):
        text = Path(name).read_text(encoding="utf-8").replace("kv_layers: [10, 20]", "kv_layers: [1, 2]")
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage, "allowed_cores", lambda: 1)
    paths.BACKBONE.parent.mkdir()
    paths.BACKBONE.symlink_to(tiny_backbone_dir)
    asked = [
        Prompt(f"p{i}", "t", ("train", "validation", "test")[i % 3], "g", {}, "", ids)
        for i, ids in enumerate(prompts(9, random_ids(5, 99)))
    ]
    write_prompts(paths.PROMPTS, asked)
    write_templates(paths.TEMPLATES, {"t": TASK})
    stage.main()
    summary = json.loads(paths.DISTILLATION_REPORT.read_text(encoding="utf-8"))
    speed = summary["throughput"]
    captured = list(read_shards(paths.FEATURES))
    assert len(captured) == speed["prompts"] == 6 and speed["resumed_prompts"] == 0
    assert speed["answer_tokens"] == sum(len(s.answer) for s in captured)
    assert speed["computed_tokens"] + speed["shared_tokens"] == sum(len(s.prompt) for s in captured)
    assert speed["shared_tokens"] >= 5 * 5
    assert speed["ratio_to_single"] > 0 and speed["processes"] == 1
    assert summary["distilled_against_single"]["mismatches"] == []


def test_half_finished_shards_of_other_settings_are_not_taken(
    tiny_backbone_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths.BACKBONE.parent.mkdir()
    paths.BACKBONE.symlink_to(tiny_backbone_dir)
    write_prompts(paths.PROMPTS, [Prompt("p", "t", "train", "g", {}, "", (5, 6))])
    write_templates(paths.TEMPLATES, {"t": TASK})
    settings = Distil(chunk_prompts=8, slots=4, equality_prompts=1)
    folders = {stage.work_folder(KV_LAYERS, settings)}
    folders |= {
        stage.work_folder(KV_LAYERS, settings.model_copy(update={name: 9})) for name in ("chunk_prompts", "slots")
    }
    folders |= {stage.work_folder((1,), settings)}
    other = tmp_path / "packed.py"
    other.write_text("# other code\n", encoding="utf-8")
    monkeypatch.setattr(stage.packed, "__file__", str(other))
    assert len(folders | {stage.work_folder(KV_LAYERS, settings)}) == 5
    assert stage.work_folder(KV_LAYERS, settings.model_copy(update={"equality_prompts": 2})) in {
        stage.work_folder(KV_LAYERS, settings)
    }


def test_a_run_that_only_took_over_claims_no_speed() -> None:
    run = stage.Run(Work(), resumed_prompts=9, wall_s=0.1, processes=2)
    figures = stage.throughput(run, Equality(1, 10, 2.0, ()))
    assert figures["ratio_to_single"] is None and figures["answer_tokens_per_s_per_process"] is None


def test_an_answer_that_differs_where_the_backbone_was_sure_stops_the_stage() -> None:
    def equality(margin: float) -> Equality:
        return Equality(1, 5, 1.0, (Mismatch("p", 2, 7, 8, margin),))

    equality(1e-4).check()
    with pytest.raises(UserError, match="changes the text"):
        equality(0.5).check()
