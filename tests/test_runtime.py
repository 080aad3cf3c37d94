"""The runtime: shared buffers, roll-back, stop rules inside accepted runs, and bundles that are not what they claim."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from components.core.errors import UserError
from components.core.manifest import MANIFEST_FILE
from components.decoding.jacobi import JacobiDrafter
from components.decoding.lookup import PromptLookup
from components.decoding.loop import decode_with_drafts
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling
from components.decoding.stopping import Answer, StopRule
from components.decoding.tree import Tree
from components.devices.shared_rows import look_at_addresses
from components.modeling.backbone import load_backbone
from components.modeling.session import TorchBackbone
from components.onnx.runtime import Bundle, open_bundle
from components.onnx.sessions import share
from helpers_bundle import DRAFT_LENGTH, MAX_LENGTH, SLOTS, Oracle, random_head, tiny_bundle

PROMPT = [7, 30, 41, 52, 63, 70, 81, 92]
BUDGET = 24


@pytest.fixture(scope="module")
def bundle_dir(tiny_backbone_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime") / "bundle"
    backbone = load_backbone(tiny_backbone_dir)
    tiny_bundle(folder, tiny_backbone_dir, backbone, random_head(backbone))
    return folder


@pytest.fixture(scope="module")
def bundle(bundle_dir: Path) -> Bundle:
    return open_bundle(bundle_dir, 1)


def empty_answer(
    bundle: Bundle, eos: set[int] | None = None, stops: tuple[str, ...] = (), budget: int = BUDGET
) -> Answer:
    return Answer(StopRule(frozenset(eos or set()), stops, budget), bundle.decode)


def greedy(bundle: Bundle, **rule: object) -> Answer:
    return bundle.start_from_ids(PROMPT, empty_answer(bundle, **rule), None).finish().answer  # type: ignore[arg-type]


def test_buffers_are_written_in_place_and_never_move(bundle: Bundle) -> None:
    """Rounds of every width leave KV rows in the arrays that numpy owns, at the same addresses, for both graphs."""
    side = bundle.backbone
    addresses = {name: (array.ctypes.data, side.values[name].data_ptr()) for name, array in side.buffers.items()}
    assert all(array_at == value_at for array_at, value_at in addresses.values())
    for array in side.buffers.values():
        array[:] = 0.0
    bundle.start_from_ids(PROMPT, empty_answer(bundle), bundle.drafter()).finish()
    assert {name: (a.ctypes.data, side.values[name].data_ptr()) for name, a in side.buffers.items()} == addresses
    for array in side.buffers.values():
        written = np.abs(array[0, 0]).sum(axis=-1) > 0
        assert written[: side.length].all()
        assert not written[side.length + DRAFT_LENGTH + 2 :].any()


def test_the_head_owns_no_keys_and_values(bundle: Bundle) -> None:
    """By the addresses of what its session reads; one copied buffer, of the same content, is found out."""
    side, head = bundle.backbone, bundle.head
    seen = look_at_addresses(bundle, PROMPT, DRAFT_LENGTH)
    assert (seen.buffers, seen.owned_bytes) == (4, 0)
    assert seen.shared_bytes == sum(side.buffers[name].nbytes for name in head.keys_values)
    name = next(iter(head.keys_values))
    head.bind_rows(name, share(side.buffers[name].copy()))
    with pytest.raises(RuntimeError, match=f"{side.buffers[name].nbytes} bytes of them its own"):
        look_at_addresses(bundle, PROMPT, DRAFT_LENGTH)
    head.bind_rows(name, side.values[name])
    assert look_at_addresses(bundle, PROMPT, DRAFT_LENGTH) == seen


def test_outputs_of_the_graph_are_the_inputs(bundle: Bundle) -> None:
    """What onnxruntime returns as present is the very memory that was bound as past."""
    side = bundle.backbone
    token = side.prefill(PROMPT)
    side.verify([token, 3])
    outputs = side._bindings[2].get_outputs()
    seen = {value.data_ptr() for value in outputs}
    assert {array.ctypes.data for array in side.buffers.values()} <= seen
    assert len(seen) == len(side.buffers) + 2


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 10**9])
@pytest.mark.parametrize("draft_length", [1, 2, 3, 7])
def test_drafts_change_nothing(bundle: Bundle, wrong_every: int, draft_length: int) -> None:
    reference = greedy(bundle)
    oracle = Oracle(PROMPT, reference.tokens, bundle.manifest.backbone.vocab_size, wrong_every)
    made = bundle.start_from_ids(PROMPT, empty_answer(bundle), oracle, draft_length).finish()
    assert made.answer.tokens == reference.tokens
    assert made.answer.stop_reason == reference.stop_reason == "length"
    if wrong_every == 10**9:
        assert made.statistics.passes == -(-(BUDGET - 1) // (draft_length + 1))
    if wrong_every == 1:
        assert made.statistics.accepted == 0


def test_head_and_lookup_give_the_greedy_tokens(bundle: Bundle) -> None:
    reference = greedy(bundle)
    for drafter in (head := bundle.drafter(), PromptLookup(3)):
        made = bundle.start_from_ids(PROMPT, empty_answer(bundle), drafter).finish()
        assert made.answer.tokens == reference.tokens
        assert sum(len(round_.drafted) for round_ in made.history) > 0 or drafter is not head


def test_jacobi_drafts_change_nothing(bundle: Bundle) -> None:
    """It reads the logits of the last pass where they lie."""
    made = bundle.start_from_ids(PROMPT, empty_answer(bundle), JacobiDrafter(bundle.backbone, 3), 4).finish()
    assert made.answer.tokens == greedy(bundle).tokens


def test_a_tree_is_refused_by_name(bundle: Bundle) -> None:
    class Fork:
        def propose(self, tokens: Sequence[int], limit: int) -> Tree:
            return Tree((4, 5), (0, 0))

    with pytest.raises(UserError, match="OrtBackbone cannot verify a tree of drafts"):
        bundle.start_from_ids(PROMPT, empty_answer(bundle), Fork()).finish()


@pytest.mark.parametrize("rule", [Sampling(0.0), Sampling(1e-4)])
def test_cold_sampling_with_the_head_is_greedy(bundle: Bundle, rule: Sampling) -> None:
    made = bundle.start_from_ids(PROMPT, empty_answer(bundle), bundle.drafter(), rule=rule).finish()
    assert made.answer.tokens == greedy(bundle).tokens


@pytest.mark.parametrize("drafted", [False, True])
def test_a_seed_gives_the_same_text_here_and_in_torch(bundle: Bundle, tiny_backbone_dir: Path, drafted: bool) -> None:
    """Both sides hand the rule the logits of the right rows: one shifted row would give another text."""
    drafter = Oracle(PROMPT, greedy(bundle).tokens, bundle.manifest.backbone.vocab_size) if drafted else None
    texts: list[list[list[int]]] = []
    for backbone in (bundle.backbone, bundle.backbone, TorchBackbone(load_backbone(tiny_backbone_dir), MAX_LENGTH)):
        answers = [empty_answer(bundle) for _ in range(6)]
        accepted = 0
        for seed, answer in enumerate(answers, start=10):
            rounds = decode_with_drafts(backbone, drafter, PROMPT, answer, 3, Sampling(0.15, 0.95, seed))
            accepted += sum(round_.accepted for round_ in rounds)
        assert (accepted > 0) is drafted
        texts.append([answer.tokens for answer in answers])
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(tokens) for tokens in texts[0]}) > 1


def test_relaxed_acceptance_counts_what_the_backbone_would_not_have_written(bundle: Bundle) -> None:
    reference = greedy(bundle)
    oracle = Oracle(PROMPT, reference.tokens, bundle.manifest.backbone.vocab_size, wrong_every=2)
    made = bundle.start_from_ids(PROMPT, empty_answer(bundle), oracle, 3, Relaxed(1e4)).finish()
    cost = made.statistics
    assert made.answer.tokens != reference.tokens
    assert cost.passes == -(-(BUDGET - 1) // 4)
    assert 0 < cost.departed <= cost.accepted
    assert bundle.start_from_ids(PROMPT, empty_answer(bundle), None).finish().statistics.departed == 0


def test_rejected_rows_are_never_seen(bundle: Bundle) -> None:
    """After a partial rejection everything behind the valid rows may hold poison; the next pass is the same."""
    side = bundle.backbone
    token = side.prefill(PROMPT)
    (second,) = side.verify([token])
    side.keep(1)
    side.verify([second])
    clean = side.last_logits.copy()

    assert side.prefill(PROMPT) == token
    truth = side.verify([token, (second + 1) % 300, 5, 6])
    assert truth[0] == second
    side.keep(1)
    for array in side.buffers.values():
        array[:, :, side.length :] = 1e6
    side.verify([second])
    np.testing.assert_array_equal(side.last_logits, clean)


def test_going_back_to_a_prompt_is_reading_it_anew(bundle: Bundle) -> None:
    """After an answer, the prompt's end comes back with the bits of its choices, of its hidden state and its rows."""
    side, reference = bundle.backbone, bundle.start_from_ids(PROMPT, empty_answer(bundle), bundle.drafter()).finish()
    token = side.prefill(PROMPT)
    hidden, logits = side.last_hidden.copy(), side.last_logits.copy()
    rows = {name: array[:, :, : len(PROMPT)].copy() for name, array in side.buffers.items()}
    again = bundle.start_from_ids(PROMPT, empty_answer(bundle), bundle.drafter(), rewind=True).finish()
    assert [one.emitted for one in again.history] == [one.emitted for one in reference.history]
    assert (side.rewind(PROMPT), side.length) == (token, len(PROMPT))
    np.testing.assert_array_equal(side.last_hidden, hidden)
    np.testing.assert_array_equal(side.last_logits, logits)
    for name, array in side.buffers.items():
        np.testing.assert_array_equal(array[:, :, : len(PROMPT)], rows[name])
    with pytest.raises(ValueError, match="prefilled last"):
        side.rewind(PROMPT[1:])


@pytest.mark.parametrize("draft_length", [1, 2, 3, 6])
def test_end_of_sequence_anywhere_in_a_run(bundle: Bundle, draft_length: int) -> None:
    free = greedy(bundle).tokens
    for at in sorted({free.index(token) for token in free}):
        eos = {free[at], next(token for token in range(300) if token not in free)}
        reference = greedy(bundle, eos=eos)
        oracle = Oracle(PROMPT, free, bundle.manifest.backbone.vocab_size)
        made = bundle.start_from_ids(PROMPT, empty_answer(bundle, eos=eos), oracle, draft_length).finish().answer
        assert (made.tokens, made.stop_reason) == (reference.tokens, "eos") == (free[: at + 1], "eos")


@pytest.mark.parametrize("budget", range(1, 11))
@pytest.mark.parametrize("draft_length", [1, 3, 6])
def test_token_limit_anywhere_in_a_run(bundle: Bundle, draft_length: int, budget: int) -> None:
    free = greedy(bundle).tokens
    oracle = Oracle(PROMPT, free, bundle.manifest.backbone.vocab_size)
    made = bundle.start_from_ids(PROMPT, empty_answer(bundle, budget=budget), oracle, draft_length).finish().answer
    assert (made.tokens, made.stop_reason) == (free[:budget], "length")


def test_stop_text_inside_a_run(bundle: Bundle) -> None:
    free = greedy(bundle)
    for stop in {bundle.decode([token]) for token in free.tokens[3:12]} - {""}:
        reference = greedy(bundle, stops=(stop,))
        oracle = Oracle(PROMPT, free.tokens, bundle.manifest.backbone.vocab_size)
        made = bundle.start_from_ids(PROMPT, empty_answer(bundle, stops=(stop,)), oracle, 6).finish()
        assert made.answer.tokens == reference.tokens
        assert stop not in made.text


def test_a_full_buffer_is_used_to_the_last_row(bundle: Bundle) -> None:
    """Prompt and budget that just fit decode the same with and without drafts; one more is refused."""
    prompt = (PROMPT * 12)[: MAX_LENGTH - 10]
    plain = bundle.start_from_ids(prompt, empty_answer(bundle, budget=11), None).finish().answer.tokens
    drafted = bundle.start_from_ids(prompt, empty_answer(bundle, budget=11), bundle.drafter()).finish().answer.tokens
    assert plain == drafted
    assert len(plain) == 11
    with pytest.raises(UserError, match="too long"):
        bundle.start_from_ids(prompt, empty_answer(bundle, budget=12), None)
    with pytest.raises(UserError, match="the prompt is too long"):
        bundle.backbone.prefill([1] * MAX_LENGTH)
    bundle.backbone.prefill([1] * (MAX_LENGTH - 1))
    with pytest.raises(UserError, match="context is full"):
        bundle.backbone.verify([1, 1])


def test_an_aborted_answer_leaves_nothing_behind(bundle: Bundle) -> None:
    reference = bundle.start("proofread", SLOTS).finish()
    started = bundle.start("proofread", {"text": "a quite different text about bread"})
    rounds = started.rounds()
    next(rounds), next(rounds)
    again = bundle.start("proofread", SLOTS).finish()
    assert again.answer.tokens == reference.answer.tokens
    with pytest.raises(RuntimeError, match="another generation"):
        next(rounds)


def test_streamed_text_is_the_answer(bundle: Bundle) -> None:
    for draft in (True, False):
        pieces = []
        generation = bundle.start("proofread", SLOTS, draft=draft)
        pieces = list(generation.stream())
        assert "".join(piece.text for piece in pieces) == generation.text == bundle.complete("proofread", SLOTS).text
        assert draft or not any(piece.drafted for piece in pieces)
    statistics = generation.statistics
    assert statistics.tokens == 12
    assert statistics.tokens_per_pass == 1.0
    assert statistics.tokens_per_s == 11 / statistics.decode_s
    assert statistics.tokens_per_s_with_prompt == 12 / (statistics.first_token_s + statistics.decode_s)
    assert statistics.first_token_s > 0


def test_stop_texts_are_held_back_while_streaming(bundle: Bundle) -> None:
    free = greedy(bundle)
    stop = free.text()[4:8]
    generation = bundle.start_from_ids(PROMPT, empty_answer(bundle, stops=(stop,)), None)
    shown = ""
    for piece in generation.stream():
        shown += piece.text
        assert generation.text.startswith(shown) or free.text().startswith(shown)
    assert shown == generation.text
    assert stop not in shown


def test_a_moved_bundle_works(bundle_dir: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "b"
    shutil.copytree(bundle_dir, moved)
    here, there = (open_bundle(folder, 1).complete("proofread", SLOTS) for folder in (bundle_dir, moved))
    assert here.answer.tokens == there.answer.tokens


@pytest.mark.parametrize(
    "name", ["backbone.onnx", "backbone.onnx.data", "head.onnx", "head.onnx.data", "tokenizer.json"]
)
def test_a_flipped_byte_is_refused(bundle_dir: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_dir, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} differs"):
        open_bundle(folder, 1)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"lacks {name}"):
        open_bundle(folder, 1)


def test_a_graph_of_another_bundle_is_refused(bundle_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle_dir, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["graphs"]["head"]["outputs"][0]["shape"] = [1, 5]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"head\.onnx does not have the output"):
        open_bundle(folder, 1)


@pytest.mark.parametrize("slots", [{}, {"text": "  "}])
def test_user_faults_have_three_lines(bundle: Bundle, slots: dict[str, str]) -> None:
    with pytest.raises(UserError, match="slot 'text'"):
        bundle.start("proofread", slots)
    with pytest.raises(UserError, match="no task 'sing'"):
        bundle.start("sing", SLOTS)


def test_the_runtime_imports_no_torch(bundle_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from components.onnx.runtime import open_bundle;"
        "import components.devices.benchmark, components.devices.verification, components.devices.circumstances;"
        f"print(open_bundle(Path({str(bundle_dir)!r}), 1).complete('proofread', {SLOTS!r}).statistics.tokens);"
        "print([name for name in ('torch', 'transformers', 'onnx', 'pyarrow', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["12", "[]"]
