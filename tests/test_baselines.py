"""Baselines on a tiny random model: each decodes the plain text, each learns, each keeps exactly what it should."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import DynamicCache

from components.baselines.assisted import AssistedGeneration, Pass, cut, rounds_of
from components.baselines.contest import Contender, Timed, run_contest
from components.baselines.eagle import EagleDrafter, EagleHead, unrolled_states
from components.baselines.medusa import MedusaDrafter, MedusaHeads
from components.baselines.memory import (
    LiveBytes,
    bytes_of,
    long_context,
    measure_first_draft,
    memory_rows,
    memory_saved,
)
from components.baselines.roster import ASSISTED_LOOKUP, ASSISTED_MODEL, EAGLE, GENERIC, MEDUSA, TUNED, Roster
from components.baselines.rows import drafter_rows, plain_seconds
from components.baselines.standalone import StandaloneDrafter, new_standalone
from components.baselines.training import Fitted, fit, fit_once, supervised_tokens
from components.baselines.ways import ADAPTIVE, JACOBI, LOOKUP, MIXED, MTP, RELAXED, TREE
from components.core import paths
from components.core.config import Branching, Compare, Drafting, Head, Standalone, Train
from components.core.files import write_json
from components.core.manifest import DraftPolicy, Policies, TaskPrompt
from components.core.params import load_params
from components.data.table import Prompt, write_prompts, write_templates
from components.decoding.bootstrap import Bootstrap
from components.decoding.loop import Drafter, decode_greedy, decode_with_drafts, longest_match
from components.decoding.metrics import count_rounds
from components.decoding.stopping import Answer, StopRule
from components.modeling.answers import collect_answers, write_table
from components.modeling.backbone import Backbone, load_backbone
from components.modeling.batches import collate, make_vocabulary
from components.modeling.chunks import make_chunks
from components.modeling.distill import ChunkDecoder
from components.modeling.features import Sequence as Captured
from components.modeling.features import write_shard
from components.modeling.head import MTPHead
from components.modeling.live import LiveEvaluator
from components.modeling.packed import ATTENTION
from components.modeling.session import TorchBackbone
from components.modeling.training import new_head
from helpers_bundle import tiny_bundle
from helpers_release import write_fake_bundle
from pipelines import compare, comparison

K, BUDGET = 3, 12
WAYS = (MTP, TREE, ADAPTIVE, MIXED, RELAXED, JACOBI, LOOKUP)
NAMES = (*WAYS, MEDUSA, EAGLE, GENERIC, TUNED, ASSISTED_MODEL, ASSISTED_LOOKUP)
EXACT = tuple(name for name in NAMES if name != RELAXED)
TASKS = {name: TaskPrompt(rendered="{text}", stop_texts=(), max_new_tokens=BUDGET) for name in ("one", "two")}
SHAPE = Standalone(layers=2, hidden_size=64, intermediate_size=96, heads=2)
COMPARE = Compare(
    seed=1,
    prompts_per_task=2,
    standalone=SHAPE,
    finetune_epochs=10,
    medusa_blocks=2,
    tree=Branching(nodes=7, depth=3, branches=3, least=0.0, copied=0, lookup_ngram=2),
    jacobi_drafts=4,
    jacobi_ngram=3,
    relaxed_margin=2.0,
    prompt_lengths=(8, 20),
    timing_repeats=2,
)
POLICIES = Policies(
    modes={
        "head": DraftPolicy(longest=5, stop_below=0.01, lookup_ngram=0),
        "hybrid": DraftPolicy(longest=6, stop_below=0.01, lookup_ngram=2),
    },
    default="head",
)
COSTS = Drafting(
    longest=7,
    thresholds=(0.0,),
    lookup_ngrams=(2,),
    pass_cost=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
    step_cost=0.1,
)
TRAIN = Train(
    seed=1,
    draft_length=K,
    step_weights=(0.5, 0.3, 0.2),
    soft_target_weight=0.5,
    epochs=50,
    batch_sequences=8,
    learning_rate=0.003,
    warmup_share=0.05,
    weight_decay=0.0,
    clip_norm=1.0,
    validate_prompts_per_task=1,
    patience=60,
    processes=1,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(3, 300, (4 + i,), generator=generator).tolist() for i in range(16)]
    return [Prompt(f"p{i:02d}", ("one", "two")[i % 2], "test", "", {}, "", tuple(one)) for i, one in enumerate(ids)]


@pytest.fixture(scope="module")
def evaluator(backbone: Backbone, prompts: list[Prompt], tiny_backbone_dir: Path) -> LiveEvaluator:
    decode = Tokenizer.from_file(str(tiny_backbone_dir / "tokenizer.json")).decode
    return LiveEvaluator(backbone, prompts, TASKS, decode, 96)


@pytest.fixture(scope="module")
def sequences(tiny_backbone_dir: Path, prompts: list[Prompt], evaluator: LiveEvaluator) -> dict[str, list[Captured]]:
    """Answers to the first twelve prompts; the last four are never trained on."""
    rows = [(prompt.prompt_id, prompt.task, list(prompt.prompt_ids)) for prompt in prompts[:12]]
    decoder = ChunkDecoder(load_backbone(tiny_backbone_dir, ATTENTION), (1, 2), evaluator.decode, 6)
    found: dict[str, list[Captured]] = {name: [] for name in TASKS}
    for chunk in make_chunks(rows, TASKS, 24):
        for sequence in decoder.run(chunk)[0]:
            found["one" if int(sequence.prompt_id[1:]) % 2 == 0 else "two"].append(sequence)
    return found


@pytest.fixture(scope="module")
def head(backbone: Backbone, sequences: dict[str, list[Captured]]) -> MTPHead:
    shape = Head(kv_layers=(1, 2), intermediate_size=96, draft_vocabulary_size=314)
    return new_head(shape, backbone, [s for part in sequences.values() for s in part], seed=0).eval()


@pytest.fixture(scope="module")
def contenders(
    evaluator: LiveEvaluator,
    head: MTPHead,
    sequences: dict[str, list[Captured]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Contender]:
    roster = Roster(evaluator, head, sequences, TRAIN, COMPARE, tmp_path_factory.mktemp("weights"))
    return {contender.name: contender for contender in roster.contenders({"epochs": 1}, POLICIES, 3)}


@pytest.fixture(scope="module")
def outcomes(
    evaluator: LiveEvaluator, contenders: dict[str, Contender], prompts: list[Prompt]
) -> dict[str, list[Timed]]:
    return run_contest(evaluator, list(contenders.values()), prompts, lambda: None)


def drafter(contender: Contender) -> Any:
    assert contender.drafter is not None
    return contender.drafter


def decoded(session: TorchBackbone, one: Drafter, prompt: Sequence[int], evaluator: LiveEvaluator) -> list[int]:
    answer = Answer(StopRule(frozenset(), (), BUDGET), evaluator.decode)
    list(decode_with_drafts(session, one, prompt, answer, K))
    return answer.tokens


def greedy(session: TorchBackbone, prompt: Sequence[int], evaluator: LiveEvaluator) -> list[int]:
    answer = Answer(StopRule(frozenset(), (), BUDGET), evaluator.decode)
    list(decode_greedy(session, prompt, answer))
    return answer.tokens


# --- the contest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_every_drafter_gives_the_plain_text(outcomes: dict[str, list[Timed]], name: str) -> None:
    assert len(outcomes[name]) == 16
    assert not [one.outcome.mismatch for one in outcomes[name] if one.outcome.mismatch is not None]


@pytest.mark.parametrize("name", [MEDUSA, EAGLE, GENERIC, TUNED, ASSISTED_MODEL])
def test_every_baseline_learns_its_text(outcomes: dict[str, list[Timed]], name: str) -> None:
    def tau(rows: list[Timed]) -> float:
        counts = [one.outcome.acceptance for one in rows]
        return sum(c.tokens for c in counts) / sum(c.passes for c in counts)

    known, unknown = outcomes[name][:12], outcomes[name][12:]
    assert tau(known) > 2.5 > 2.0 > tau(unknown)


def test_transformers_and_our_loop_accept_the_same_drafts(outcomes: dict[str, list[Timed]]) -> None:
    """The same drafter in another's loop: rounds differ in place only, since that one drafts from the start."""
    for ours, theirs in zip(outcomes[TUNED], outcomes[ASSISTED_MODEL], strict=True):
        assert theirs.outcome.acceptance.tokens == ours.outcome.acceptance.tokens + 1
        assert abs(theirs.outcome.acceptance.passes - ours.outcome.acceptance.passes) <= 1


def rows_of(contender: Contender, timed: Sequence[Timed]) -> dict[str, Any]:
    return drafter_rows(contender, timed, list(TASKS), Bootstrap(50, seed=3), COSTS)


def test_the_rows_hold_every_figure(
    outcomes: dict[str, list[Timed]], contenders: dict[str, Contender], prompts: list[Prompt]
) -> None:
    for name in NAMES:
        document = json.loads(json.dumps(rows_of(contenders[name], outcomes[name])))
        assert [row["task"] for row in document["tasks"]] == ["one", "two"]
        for row in [*document["tasks"], document["overall"]]:
            low, high = row["extra_tokens_per_pass_interval"]
            assert low <= row["extra_tokens_per_pass"] <= high
            assert row["extra_tokens_per_pass"] == pytest.approx(row["acceptance_length"] - 1)
            assert len(row["conditional_acceptance"]) <= contenders[name].draft_length
            assert name == RELAXED or (row["exact_match"] == 1.0 and row["mismatches"] == [])
            assert set(row["draft_ms_per_step"]) == set(row["prompt_pass_ms"]) == {"median", "samples"}
            assert row["rows_per_pass"] == row["drafts_per_round"] + 1 <= most_drafts(contenders[name]) + 1
            assert 0 <= row["draft_seconds_per_answer"]["median"] <= row["seconds_per_answer"]["median"]
        if name not in (ASSISTED_LOOKUP, LOOKUP):
            assert document["overall"]["draft_ms_per_step"]["samples"] > 10
            assert contenders[name].training or name in (ASSISTED_MODEL, JACOBI)
        assert set(document["seconds"]) == set(plain_seconds(outcomes[name])) == {one.prompt_id for one in prompts}


def most_drafts(contender: Contender) -> int:
    return COMPARE.tree.nodes if contender.name == TREE else contender.draft_length


def test_each_way_drafts_as_far_as_it_may(outcomes: dict[str, list[Timed]], contenders: dict[str, Contender]) -> None:
    """A contender carries its own longest draft; a tree runs the head once a level; what is free costs no step."""
    overall = {name: rows_of(contenders[name], outcomes[name])["overall"] for name in NAMES}
    longest = {name: max(width for one in outcomes[name] for width in one.widths) - 1 for name in NAMES}
    assert {name: contenders[name].draft_length for name in WAYS} == {
        MTP: K, TREE: 3, ADAPTIVE: 5, MIXED: 6, RELAXED: K, JACOBI: 4, LOOKUP: K,
    }  # fmt: skip
    assert all(longest[name] <= most_drafts(contenders[name]) for name in NAMES)
    assert longest[TREE] == 7 and longest[JACOBI] == 4 and longest[MEDUSA] == K
    assert overall[MTP]["steps_per_round"] == overall[MTP]["drafts_per_round"]
    assert overall[TREE]["steps_per_round"] <= 3 < overall[TREE]["drafts_per_round"]
    assert overall[JACOBI]["steps_per_round"] == overall[LOOKUP]["steps_per_round"] == 0
    assert overall[ADAPTIVE]["drafts_per_round"] < overall[MTP]["drafts_per_round"], "an untrained head is unsure"


def test_the_modelled_speedup_is_that_of_the_cost_model(
    outcomes: dict[str, list[Timed]], contenders: dict[str, Contender]
) -> None:
    timed = [
        replace(one, widths=(4, 2), times=replace(one.times, steps=4), outcome=with_counts(one, 2, 5))
        for one in outcomes[MTP][:2]
    ]
    row = rows_of(contenders[MTP], timed)["overall"]
    assert row["modelled_speedup"] == pytest.approx(5 / (1.3 + 1.1 + 4 * 0.1))
    assert (row["rows_per_pass"], row["steps_per_round"]) == (3.0, 2.0)
    wide = [replace(timed[0], widths=(9, 2)), timed[1]]
    assert rows_of(contenders[MTP], wide)["overall"]["modelled_speedup"] is None, "the model knows eight widths"


def with_counts(one: Timed, passes: int, tokens: int) -> Any:
    return replace(one.outcome, acceptance=replace(one.outcome.acceptance, passes=passes, tokens=tokens))


def test_relaxed_acceptance_tells_what_it_changed(
    outcomes: dict[str, list[Timed]], contenders: dict[str, Contender]
) -> None:
    overall = rows_of(contenders[RELAXED], outcomes[RELAXED])["overall"]
    assert "exact_match" not in overall and "mismatches" not in overall
    tokens = sum(one.outcome.tokens for one in outcomes[RELAXED])
    assert overall["departed_share"] == sum(one.departed for one in outcomes[RELAXED]) / tokens
    changed = [one for one in outcomes[RELAXED] if one.outcome.mismatch is not None]
    assert overall["changed_answers"] == len(changed) / 16 > 0
    assert all(one.departed > 0 for one in changed)


def test_baselines_get_the_epochs_and_answers_of_the_head(
    contenders: dict[str, Contender], sequences: dict[str, list[Captured]]
) -> None:
    vocabulary = make_vocabulary(range(314), 314)
    seen = TRAIN.epochs * sum(supervised_tokens(part, vocabulary) for part in sequences.values())
    assert seen == TRAIN.epochs * sum(len(s.answer) - 1 for part in sequences.values() for s in part)
    for training in (contenders[MEDUSA].training, contenders[EAGLE].training, contenders[GENERIC].training[GENERIC]):
        assert (training["epochs"], training["supervised_answer_tokens"]) == (TRAIN.epochs, seen)
        assert training["skipped_batches"] == 0
    assert set(contenders[TUNED].training) == {GENERIC, f"{TUNED}-one", f"{TUNED}-two"}


def test_finished_weights_are_not_trained_again(tmp_path: Path) -> None:
    def never() -> Fitted:
        raise AssertionError("trained twice")

    fitted = Fitted(2, 3, 0, 40, 1.5, 1)
    one, other = (MedusaHeads(8, 2, 1) for _ in range(2))
    with torch.no_grad():
        one.towers[0][0].linear.weight.normal_()  # type: ignore[index, union-attr]
    assert fit_once(tmp_path / "w.safetensors", one, lambda: fitted) == fitted
    assert fit_once(tmp_path / "w.safetensors", other, never) == fitted
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_batches_that_are_not_finite_change_nothing_and_are_counted(sequences: dict[str, list[Captured]]) -> None:
    module = torch.nn.Linear(2, 1)
    before = [parameter.clone() for parameter in module.parameters()]

    def poisoned(_: list[Captured]) -> torch.Tensor:
        return module(torch.ones(2)).sum() * float("nan")

    settings = TRAIN.model_copy(update={"epochs": 2, "batch_sequences": 3})
    fitted = fit(module, sequences["one"], poisoned, settings, make_vocabulary(range(314), 314), "poison")
    assert (fitted.steps, fitted.skipped_batches) == (4, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


# --- caches -----------------------------------------------------------------------------------------------------------


def test_eagle_forgets_rejected_rows(evaluator: LiveEvaluator, contenders: dict[str, Contender]) -> None:
    """After rounds with rejections, rows and drafts are those of a pass over the whole context at once."""
    trained = drafter(contenders[EAGLE])
    session = TorchBackbone(evaluator.session.backbone, 64)
    used = EagleDrafter(trained.head, session, trained.draft_rows, trained.draft_to_target)
    prompt = [9, 8, 7, 200, 31]
    truth = greedy(TorchBackbone(evaluator.session.backbone, 64), prompt, evaluator)
    context = [*prompt, session.prefill(prompt)]
    for accepted in (0, 2, 0, 1):
        used.propose(context, K)
        done = len(context) - len(prompt)
        right = truth[done : done + accepted]
        wrong = [(truth[done + accepted] + 1) % 300] * (K - accepted)
        answers = session.verify([context[-1], *right, *wrong])
        session.keep(longest_match([*right, *wrong], answers) + 1)
        context += answers[: accepted + 1]
        assert context == [*prompt, *truth[: done + accepted + 1]]
    drafts = used.propose(context, K)
    clean = TorchBackbone(evaluator.session.backbone, 64)
    clean.prefill(context[:-1])
    fresh = EagleDrafter(trained.head, clean, trained.draft_rows, trained.draft_to_target)
    assert fresh.propose(context, K) == drafts
    for (keys, values), (wanted_keys, wanted_values) in zip(used.rows, fresh.rows, strict=True):
        assert keys.shape[2] == clean.length == session.length
        torch.testing.assert_close(keys, wanted_keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, wanted_values, rtol=1e-4, atol=1e-4)
    assert decoded(session, used, prompt, evaluator) == decoded(session, used, prompt, evaluator) == truth


def test_torch_goes_back_to_a_prompt_as_if_it_read_it_anew(evaluator: LiveEvaluator) -> None:
    session, prompt = TorchBackbone(evaluator.session.backbone, 64), [9, 8, 7, 200, 31]
    token = session.prefill(prompt)
    hidden, logits = session.last_hidden.clone(), session.last_logits.clone()
    following = session.verify([token, 5, 6])
    session.keep(2)
    assert (session.rewind(prompt), session.length) == (token, len(prompt))
    assert torch.equal(session.last_hidden, hidden)
    assert torch.equal(session.last_logits, logits)
    assert session.verify([token, 5, 6]) == following
    with pytest.raises(ValueError, match="prefilled last"):
        session.rewind(prompt[1:])


def test_eagle_refuses_rows_that_it_never_saw(evaluator: LiveEvaluator, contenders: dict[str, Contender]) -> None:
    trained = drafter(contenders[EAGLE])
    session = TorchBackbone(evaluator.session.backbone, 64)
    late = EagleDrafter(trained.head, session, trained.draft_rows, trained.draft_to_target)
    context = [9, 8, 7, session.prefill([9, 8, 7])]
    context += session.verify(context[-1:])
    session.keep(1)
    with pytest.raises(RuntimeError, match="never seen"):
        late.propose(context, K)


def test_eagle_trains_on_what_it_sees_when_it_drafts(
    backbone: Backbone, contenders: dict[str, Contender], sequences: dict[str, list[Captured]]
) -> None:
    """States of the batched unroll are those of row-by-row decoding with the same tokens."""
    trained: EagleHead = drafter(contenders[EAGLE]).head
    batch = collate(sequences["one"][:3], K, make_vocabulary(range(314), 314))
    states = unrolled_states(trained, backbone.embed, sequences["one"][:3], batch)
    for row, sequence in enumerate(sequences["one"][:3]):
        tokens = torch.tensor([sequence.prompt + sequence.answer])
        for anchor in range(len(sequence.answer) - K):
            last = len(sequence.prompt) - 1 + anchor
            embedding = backbone.embed(tokens[:, 1 : last + 2])
            state, rows = trained.extend(embedding, sequence.hidden[None, : last + 1], trained.no_rows(1))
            for depth in range(K):
                torch.testing.assert_close(states[depth][row, anchor], state[0, -1], rtol=1e-4, atol=1e-4)
                following = backbone.embed(tokens[:, last + 2 + depth : last + 3 + depth])
                state, rows = trained.extend(following, state[:, -1:], rows)


def test_the_standalone_cache_is_that_of_a_fresh_pass(
    evaluator: LiveEvaluator, contenders: dict[str, Contender], prompts: list[Prompt]
) -> None:
    model = drafter(contenders[GENERIC]).model
    for prompt in prompts[10:]:
        used = StandaloneDrafter(model)
        decoded(evaluator.session, used, prompt.prompt_ids, evaluator)
        fresh = DynamicCache()
        with torch.inference_mode():
            model.model(input_ids=torch.tensor([used.seen]), cache=fresh, use_cache=True)
        for mine, wanted in zip(used.cache.layers, fresh.layers, strict=True):
            assert mine.keys.shape[2] == len(used.seen)
            torch.testing.assert_close(mine.keys, wanted.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, wanted.values, rtol=1e-4, atol=1e-4)


def test_the_standalone_drafts_what_a_fresh_one_drafts(contenders: dict[str, Contender]) -> None:
    model = drafter(contenders[GENERIC]).model
    used, context = StandaloneDrafter(model), [9, 8, 7, 200, 31, 7]
    for step in range(6):
        drafts = used.propose(context, K)
        assert drafts == StandaloneDrafter(model).propose(context, K)
        context = [*context, *drafts[: step % (K + 1)], 40 + step]
    assert used.propose([5, 6], K) == StandaloneDrafter(model).propose([5, 6], K)


def test_a_token_outside_the_vocabulary_is_read_and_never_drafted(backbone: Backbone) -> None:
    vocabulary = make_vocabulary(range(0, 314, 2), 314)
    model = new_standalone(SHAPE, backbone.card, vocabulary, 0).eval()
    drafts = StandaloneDrafter(model).propose([3, 5, 7, 8], K)
    assert len(drafts) == K and all(token % 2 == 0 for token in drafts)
    logits = model(input_ids=torch.tensor([[3, 5, 7, 8]])).logits
    assert logits.shape == (1, 4, 314)
    assert int(logits[0, -1].argmax()) == drafts[0]


# --- assisted generation --------------------------------------------------------------------------------------------


def test_a_perfect_assistant_needs_the_fewest_passes(evaluator: LiveEvaluator, prompts: list[Prompt]) -> None:
    """A copy of the backbone assists it: every pass gives K + 1 tokens, the prompt pass too, as counted by the hook."""
    backbone = evaluator.session.backbone
    assisted = AssistedGeneration(backbone, evaluator.decode, copy.deepcopy(backbone.model))
    rule = StopRule(frozenset(), (), BUDGET)
    answer, rounds = assisted.generate(prompts[0].prompt_ids, rule, K)
    assert len(answer.tokens) == BUDGET
    counts = count_rounds(rounds, K)
    assert counts.tokens == BUDGET
    assert counts.passes == BUDGET // (K + 1)


def test_rounds_are_rebuilt_from_widths() -> None:
    """Two of three drafts right behind the prompt, then none, then a run that goes beyond the end of the answer."""
    passes = [Pass(0, (1, 2, 11, 12, 99), 0.1), Pass(4, (13, 98, 98, 98), 0.1), Pass(5, (14, 15, 16, 17), 0.1)]
    rounds = rounds_of(passes, 2, [11, 12, 13, 14, 15, 16, 17, 18], kept=6)
    assert [one.emitted for one in rounds] == [(), (11, 12, 13), (14,), (15, 16)]
    assert [one.drafted for one in rounds[1:]] == [(11, 12, 99), (98, 98, 98), (15, 16, 17)]
    assert [one.accepted for one in rounds] == [0, 2, 0, 2]
    counts = count_rounds(rounds, 3)
    assert (counts.passes, counts.tokens) == (3, 6)
    assert (counts.reached, counts.accepted) == ((3, 2, 1), (2, 2, 0))


def test_an_answer_is_cut_where_our_rule_ends_it() -> None:
    rule = StopRule(frozenset({7}), (), 5)
    assert cut([1, 2, 7, 4], rule, str).tokens == [1, 2, 7]
    assert cut(range(10, 20), rule, str).tokens == [10, 11, 12, 13, 14]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_live_bytes_sees_what_stays_and_what_goes() -> None:
    outside = torch.randn(10, 10)
    with LiveBytes() as counted:
        kept = [outside + 1]
        (outside @ outside).view(-1)
        outside.view(-1)[:5].add_(1)
    assert (counted.live, counted.peak) == (400, 800)
    kept.clear()
    assert counted.live == 0
    assert bytes_of([outside, outside[:2], torch.zeros(3)]) == 412


def test_only_drafters_with_a_cache_own_keys_and_values(contenders: dict[str, Contender], backbone: Backbone) -> None:
    session, length = drafter(contenders[EAGLE]).session, 20
    context, _ = long_context(session, list(range(3, 40)), length)
    kept = {
        name: measure_first_draft(drafter(contenders[name]), context, K, 2)
        for name in NAMES
        if contenders[name].drafter is not None
    }
    card = backbone.card
    assert {kept[name].kv_bytes for name in (MTP, TREE, JACOBI, LOOKUP, MEDUSA)} == {0}
    assert kept[EAGLE].kv_bytes == 2 * 2 * 4 * length * card.kv_heads * card.head_dim
    assert kept[GENERIC].kv_bytes == SHAPE.layers * 2 * 4 * SHAPE.hidden_size * (length + K)
    assert all(one.first_draft_ms > 0 and one.samples == 2 for one in kept.values())
    assert kept[GENERIC].activations_bytes > 4 * length * SHAPE.hidden_size
    assert kept[MTP].activations_bytes > 0


def test_a_cache_that_nobody_declared_is_found_out(contenders: dict[str, Contender]) -> None:
    class Hoarder(MedusaDrafter):
        def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
            self.hoard = self.session.last_hidden.clone()
            return super().propose(tokens, limit)

    honest = drafter(contenders[MEDUSA])
    context, _ = long_context(honest.session, [5, 6, 7], 8)
    hoarder = Hoarder(honest.heads, honest.session, honest.draft_rows, honest.draft_to_target)
    assert measure_first_draft(hoarder, context, K, 1).kv_bytes == 4 * 64


def test_the_memory_table_adds_up(
    contenders: dict[str, Contender],
    outcomes: dict[str, list[Timed]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = drafter(contenders[EAGLE]).session
    rows = memory_rows(list(contenders.values()), session, list(range(3, 40)), (8, 20), 2)
    assert len(rows) == 2 * 8
    kinds = ("weights_bytes", "copied_rows_bytes", "kv_bytes", "activations_bytes")
    assert all(row["total_bytes"] == sum(row[kind] for kind in kinds) for row in rows)
    saved = memory_saved(rows, MTP, GENERIC)
    assert [row["prompt_tokens"] for row in saved] == [8, 20]
    assert saved[1]["kv_bytes"] > saved[0]["kv_bytes"] > 0
    drafters = [
        {"name": name, "parameters": contenders[name].parameters or None} | rows_of(contenders[name], outcomes[name])
        for name in NAMES
    ]
    made = {"cpu": "a cpu", "threads": 1, "precision": "float32"}
    monkeypatch.chdir(tmp_path)
    assert comparison.comparison_lines() == []
    file = paths.COMPARISON_REPORT
    file.parent.mkdir(parents=True)
    digest = write_fake_bundle(paths.BUNDLE)
    document = {"created_with": made, "drafters": drafters, "memory": rows, "memory_saved": saved}
    file.write_text(json.dumps(document | {"head_in_bundle": {"bundle_sha256": "of another"}}))
    assert "earlier bundle" in comparison.comparison_lines()[-1]
    file.write_text(json.dumps(document | {"head_in_bundle": {"bundle_sha256": digest}}))
    text = "\n".join(comparison.comparison_lines())
    assert all(name in text for name in NAMES)
    assert "saved MB" in text and "16 prompts" in text
    assert "mtp_relaxed: " in text and "of answers differ" in text
    assert max(map(len, text.splitlines())) <= 120


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def project(
    backbone: Backbone,
    head: MTPHead,
    prompts: list[Prompt],
    sequences: dict[str, list[Captured]],
    tiny_backbone_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the stage reads, made small, in the current folder."""
    root = Path(__file__).resolve().parent.parent
    params = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    params["compare"] = COMPARE.model_dump(mode="json")
    params["train"] |= {"epochs": 2}
    params["runtime"] |= {"threads": 1}
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    splits = [replace(prompt, split="train" if index < 12 else "test") for index, prompt in enumerate(prompts)]
    write_prompts(paths.PROMPTS, splits)
    write_templates(paths.TEMPLATES, TASKS)
    paths.FEATURES.mkdir(parents=True)
    for number, part in enumerate(sequences.values()):
        write_shard(paths.FEATURES, number, part)
    write_table(paths.ANSWERS, collect_answers(splits, paths.FEATURES))
    paths.BACKBONE.parent.mkdir()
    paths.BACKBONE.symlink_to(tiny_backbone_dir)
    head.save_pretrained(paths.HEAD)
    tiny_bundle(paths.BUNDLE, tiny_backbone_dir, backbone, head)
    write_json(paths.POLICY, {"policies": POLICIES.model_dump()})
    write_json(paths.TRAINING_REPORT, {"steps": 7, "supervised_positions": [40, 30, 20], "validation": [{}, {}]})


@pytest.mark.usefixtures("project")
def test_the_command_writes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    older = paths.WORK / "compare-0123"
    older.mkdir(parents=True)
    compare.run_comparison()
    assert "compare: extra tokens per pass mtp" in capsys.readouterr().out
    document = json.loads(paths.COMPARISON_REPORT.read_text(encoding="utf-8"))
    assert [one["name"] for one in document["drafters"]] == list(NAMES)
    for one in document["drafters"]:
        assert [row["prompts"] for row in one["tasks"]] == [2, 2]
        assert one["overall"].get("exact_match", 1.0) == 1.0
        assert set(one["seconds"]) == set(document["plain_seconds"])
    assert document["drafters"][0]["training"]["supervised_answer_tokens"] == 80
    assert document["head_in_bundle"]["owned_bytes"] == 0
    assert {row["prompt_tokens"] for row in document["memory"]} == set(COMPARE.prompt_lengths)
    assert "before timing" in comparison.comparison_lines()[-1]
    for_readme = (comparison.comparison_markdown() or "").splitlines()
    assert [line.split(" | ")[0] for line in for_readme[2:]][: len(NAMES)] == [f"| {name}" for name in NAMES]
    (kept,) = paths.WORK.glob("compare-*")
    assert kept != older, "weights made from something else are gone"
    assert kept == compare.work_folder(load_params()) and len(list(kept.glob("*.safetensors"))) == 5


@pytest.mark.usefixtures("project")
def test_only_what_weights_are_made_from_names_their_folder() -> None:
    params = load_params()

    def folder(**changes: Any) -> Path:
        return compare.work_folder(params.model_copy(update=changes))

    tree = COMPARE.tree.model_copy(update={"nodes": 3})
    contest = COMPARE.model_copy(
        update={"tree": tree, "jacobi_drafts": 2, "relaxed_margin": 9.0, "prompts_per_task": 7, "timing_repeats": 1}
    )
    shapes = [COMPARE.model_copy(update=one) for one in ({"medusa_blocks": 5}, {"seed": 4}, {"finetune_epochs": 1})]
    other, before = folder(train=params.train.model_copy(update={"epochs": 3})), folder()
    assert folder(compare=contest, drafting=COSTS) == before
    assert len({before, other, *(folder(compare=one) for one in shapes)}) == 5
    with paths.ANSWERS.open("ab") as answers:
        answers.write(b"more")
    assert folder() != before
