"""Corpora, recipes, splits and the prompt table."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from components.core.config import SPLITS, Data, Task
from components.core.errors import UserError
from components.data import recipes
from components.data.corpora import Conversation, Message, is_usable, load_chats, load_misspellings, word_ngrams
from components.data.prompts import Corpus, build_prompts
from components.data.splits import split_of
from components.data.table import Prompt, read_prompts, write_prompts
from helpers_data import MISSPELLINGS, NAMES, TASKS, data_params, make_chats, sentence, write_jsonl

CHATS = make_chats(150)
CORPUS = Corpus(CHATS, MISSPELLINGS, NAMES)


def encode(task: str, slots: Mapping[str, str]) -> list[int]:
    """A stand-in for the tokenizer: one token a byte, the template first."""
    return [len(task), *"\n".join(slots.values()).encode()]


def build(data: Data | None = None, corpus: Corpus = CORPUS, tasks: Mapping[str, Task] = TASKS) -> tuple[Prompt, ...]:
    return build_prompts(tasks, data or data_params(), corpus, encode)


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("what time does your class start tomorrow?", True),
        ("I passed the assessment, classic grass :)", True),
        ("see https://example.com for that thing", False),
        ("write me at someone@example.com please", False),
        ("call me on 555-123-4567 when you can", False),
        ("this damn printer never works for me", False),
        ("you are so STUPID sometimes my friend", False),
        ("что ты делаешь сегодня вечером дома", False),
        (":) :) :) ---- >>> 12345 67 89 !!! ???", False),
        ("nooooooo that is not what i meant", False),
        ("too short", False),
        ("x " * 100, False),
        ("a null \x00 byte inside of a message", False),
    ],
)
def test_only_polite_real_text_is_used(text: str, usable: bool) -> None:
    assert is_usable(text, 20, 160) is usable


def test_copies_are_seen_through_case_and_punctuation_and_when_short() -> None:
    assert word_ngrams("Hello,  there -- FRIEND!", 8) == word_ngrams("hello there friend", 8)
    assert word_ngrams("so one two three four", 4) & word_ngrams("One, two; three: four. five", 4)
    assert not word_ngrams("?!", 8)


def test_chats_are_read_in_an_order_of_their_own(tmp_path: Path) -> None:
    turn = [{"text": "hi\n there ", "sender": "s", "timestamp": ""}, {"text": "you", "sender": "s", "timestamp": ""}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"b": {"messages": [turn, turn]}, "a": {"messages": []}}), encoding="utf-8")
    first, second = load_chats(path)
    assert (first.identity, second.identity) == ("a", "b")
    assert second.messages[:2] == (Message("s", "hi there"), Message("s", "you"))
    assert len(second.messages) == 4


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"a": {"messages": [[{"txt": "x"}]]}}', '{"a": 3}', '{"a": {"messages": []}}']
)
def test_a_broken_chat_corpus_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"chat\.json"):
        load_chats(path)


def test_misspellings_that_are_words_or_unlike_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text(
        "because becuase 'cause becausee\nluck lock lukc\nlock lcok\nthe teh\nraincoat rainjack\n", encoding="utf-8"
    )
    found = load_misspellings(path)
    assert found == {"because": ("becausee", "becuase"), "luck": ("lukc",), "lock": ("lcok",), "the": ("teh",)}
    path.write_text("lonely\n", encoding="utf-8")
    with pytest.raises(UserError, match="no misspelling"):
        load_misspellings(path)


# --- recipes ------------------------------------------------------------------------------------------------------


def test_a_stack_quotes_consecutive_messages_under_steady_names() -> None:
    chats = make_chats(30)
    by_group = {chat.identity: chat for chat in chats}
    seen = 0
    for candidate in recipes.notifications(chats, NAMES, 7):
        quoted = re.findall(r'(\w+) says: "(.*?)"', candidate.slots["notifications"])
        texts = [text for _, text in quoted]
        messages = by_group[candidate.group].messages
        starts = [i for i in range(len(messages)) if [m.text for m in messages[i : i + len(texts)]] == texts]
        assert starts, "not consecutive"
        senders = [message.sender for message in messages[starts[0] : starts[0] + len(texts)]]
        assert len({*zip(senders, (name for name, _ in quoted), strict=True)}) == len(set(senders))
        assert candidate.slots["sender"] == quoted[0][0]
        assert 2 <= len(texts) <= 5
        assert candidate.source_text.split("\n") == texts
        seen += 1
    assert seen >= 30


def test_misspelling_changes_words_and_keeps_their_case() -> None:
    rng = random.Random(3)
    for _ in range(50):
        text = sentence(rng).capitalize() + " RIVER"
        wrong = recipes.misspell(text, MISSPELLINGS, rng)
        assert wrong is not None
        before, after = text.split(), wrong.split()
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        assert 1 <= len(changed) <= 3
        for old, new in changed:
            assert new.lower() in MISSPELLINGS[old.lower()]
            assert (new.isupper(), new[0].isupper()) == (old.isupper(), old[0].isupper())
    assert recipes.misspell("nothing known here", MISSPELLINGS, rng) is None


def test_the_source_of_a_misspelt_text_is_the_text_as_it_was_written() -> None:
    written = {message.text for chat in CHATS for message in chat.messages}
    for candidate in recipes.misspelt(CHATS[:20], MISSPELLINGS, 7):
        assert candidate.source_text in written
        assert candidate.slots["text"] not in written


def test_leaving_one_conversation_out_changes_no_other_candidate() -> None:
    for draw in (
        lambda chats: recipes.notifications(chats, NAMES, 7),
        lambda chats: recipes.misspelt(chats, MISSPELLINGS, 7),
        lambda chats: recipes.last_message(chats, NAMES, 7),
    ):
        whole, rest = list(draw(CHATS[:20])), list(draw(CHATS[1:20]))
        gone = CHATS[0].identity
        assert any(candidate.group == gone for candidate in whole)
        key = lambda candidate: (candidate.group, candidate.source_text)  # noqa: E731
        assert sorted(rest, key=key) == sorted((c for c in whole if c.group != gone), key=key)


def test_every_conversation_gives_one_before_any_gives_two() -> None:
    groups = [candidate.group for candidate in recipes.last_message(CHATS[:20], NAMES, 7)]
    assert len(set(groups[:20])) == 20
    assert len(groups) > 20


def test_names_come_from_the_pinned_list_and_are_many() -> None:
    names = recipes.first_names()
    assert list(names) == sorted(set(names))
    assert len(names) > 300


# --- the table ----------------------------------------------------------------------------------------------------


def test_counts_are_exact_and_no_conversation_is_in_two_splits() -> None:
    prompts = build()
    counts = Counter((prompt.task, prompt.split) for prompt in prompts)
    assert counts == {
        (task, split): n for task in TASKS for split, n in (("train", 20), ("validation", 4), ("test", 8))
    }
    splits = defaultdict(set)
    for prompt in prompts:
        splits[prompt.group].add(prompt.split)
    assert all(len(found) == 1 for found in splits.values())
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


def test_held_out_prompts_share_no_run_of_words_with_training_of_any_task() -> None:
    """Every second chat is a copy of another one, disguised by case and punctuation."""
    originals = make_chats(150)
    disguised = tuple(
        Conversation(
            f"copy-{chat.identity}",
            tuple(Message(m.sender, ", ".join(m.text.upper().split()) + "!") for m in chat.messages),
        )
        for chat in originals
    )
    assert {split_of(c.identity, 7) for c in disguised} == set(SPLITS)
    prompts = build(corpus=Corpus(originals + disguised, MISSPELLINGS, NAMES), data=data_params(train=60))
    runs = {split: set() for split in SPLITS}
    for prompt in prompts:
        runs[prompt.split] |= word_ngrams(prompt.source_text, 8)
    assert not runs["train"] & runs["test"]
    assert not runs["train"] & runs["validation"]
    assert not runs["test"] & runs["validation"]


def test_copies_really_cost_held_out_prompts() -> None:
    """One text for all: training may have it, the test split then has nothing left."""
    same = tuple(
        Conversation(c.identity, (Message("s", "market river garden walk picture window kitchen train"),))
        for c in CHATS
    )
    with pytest.raises(UserError, match="test"):
        build(corpus=Corpus(same, MISSPELLINGS, NAMES), data=data_params(1, 1, 1), tasks={"reply": TASKS["reply"]})


def test_no_prompt_comes_twice() -> None:
    same = (Message("s", "market river garden walk picture window kitchen train"),) * 3
    chats = tuple(Conversation(chat.identity, same) for chat in CHATS)
    task = Task(recipe="last_message", user="{text}")
    with pytest.raises(UserError, match="2 train prompts are wanted"):
        build(corpus=Corpus(chats, MISSPELLINGS, NAMES), data=data_params(2, 1, 1), tasks={"reply": task})


def test_long_prompts_are_left_out() -> None:
    prompts = build(data_params(most=80), tasks={"reply": TASKS["reply"]})
    assert max(prompt.prompt_tokens for prompt in prompts) <= 80
    assert max(prompt.prompt_tokens for prompt in build(tasks={"reply": TASKS["reply"]})) > 80


def test_too_few_prompts_are_an_error_that_names_task_and_split() -> None:
    with pytest.raises(UserError, match="task summary: 100000 train prompts") as caught:
        build(data_params(train=100_000))
    assert "data.prompts_per_task.train" in caught.value.do


def test_more_training_prompts_move_no_conversation_and_keep_the_first_ones() -> None:
    few, many = build(), build(data_params(train=40))
    place = {prompt.group: prompt.split for prompt in many}
    assert all(place.get(prompt.group, prompt.split) == prompt.split for prompt in few)
    train = [prompt for prompt in many if prompt.split == "train" and prompt.task == "reply"]
    assert train[:20] == [prompt for prompt in few if prompt.split == "train" and prompt.task == "reply"]


def test_the_seed_and_nothing_else_decides(tmp_path: Path) -> None:
    shuffled = list(CHATS)
    random.Random(1).shuffle(shuffled)
    assert build() == build(corpus=Corpus(tuple(sorted(shuffled, key=lambda c: c.identity)), MISSPELLINGS, NAMES))
    assert build() == build(corpus=Corpus(tuple(shuffled), MISSPELLINGS, NAMES))
    assert {p.prompt_id for p in build()} != {p.prompt_id for p in build(data_params(seed=8))}
    script = (
        "import sys; from pathlib import Path; from components.data.table import write_prompts; "
        "from test_prompts import build; write_prompts(Path(sys.argv[1]), build())"
    )
    root = Path(__file__).resolve().parents[1]
    written = []
    for hash_seed in ("1", "2"):
        target = tmp_path / f"{hash_seed}.parquet"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
        subprocess.run([sys.executable, "-c", script, str(target)], env=environment, check=True, cwd=root)
        written.append(target.read_bytes())
    assert written[0] == written[1]


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    prompts = build()
    write_prompts(tmp_path / "prompts.parquet", prompts)
    assert read_prompts(tmp_path / "prompts.parquet") == prompts


def test_a_missing_or_foreign_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        read_prompts(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("not parquet", encoding="utf-8")
    with pytest.raises(UserError, match="not a prompt table"):
        read_prompts(tmp_path / "bad.parquet")


def test_the_default_draws_stay_as_they_are() -> None:
    """Every figure rests on these prompts: what is drawn by default may change on purpose only."""
    rows = [[p.task, p.split, p.group, dict(p.slots), p.source_text, p.prompt_ids] for p in build()]
    assert len(rows) == 96
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "f0833ec73da1a49a"


# --- choices and bounds ---------------------------------------------------------------------------------------------

TONES = ("warm", "formal", "playful")


def rewrite(choices: Mapping[str, tuple[str, ...]]) -> Mapping[str, Task]:
    slots = "".join(f" {{{name}}}" for name in choices)
    return {"rewrite": Task(recipe="last_message", user="{text}" + slots, choices=choices)}


def test_a_choice_is_drawn_for_each_prompt_and_changes_nothing_else() -> None:
    plain = build(tasks=rewrite({}))
    chosen = build(tasks=rewrite({"tone": TONES, "limit": ("short", "long")}))
    assert [(p.split, p.group, p.slots["text"]) for p in chosen] == [(p.split, p.group, p.slots["text"]) for p in plain]
    assert [p.source_text for p in chosen] == [p.source_text for p in plain]
    assert len({(p.slots["tone"], p.slots["limit"]) for p in chosen}) == 6, "both are drawn, each by itself"
    other = build(data_params(seed=8), tasks=rewrite({"tone": TONES}))
    assert {p.slots["tone"] for p in other} == set(TONES)


def test_a_choice_depends_on_its_own_text_alone() -> None:
    whole = {p.source_text: p.slots["tone"] for p in build(tasks=rewrite({"tone": TONES}))}
    fewer = {
        p.source_text: p.slots["tone"]
        for p in build(
            data_params(train=10),
            corpus=Corpus(CHATS[1:], MISSPELLINGS, NAMES),
            tasks={**TASKS, **rewrite({"tone": TONES})},
        )
        if p.task == "rewrite"
    }
    shared = whole.keys() & fewer.keys()
    assert len(shared) > 10
    assert all(whole[text] == fewer[text] for text in shared)


def test_bounds_hold_and_the_defaults_are_as_if_none_were_given() -> None:
    chats = make_chats(40, messages=30)
    task = Task(recipe="notifications", user="{notifications}", messages=(8, 12), characters=(300, 700))
    prompts = build(data_params(8, 1, 2, most=2000), Corpus(chats, MISSPELLINGS, NAMES), {"long": task})
    stacks = [prompt.source_text.split("\n") for prompt in prompts]
    assert all(8 <= len(stack) <= 12 and 300 <= sum(map(len, stack)) <= 700 for stack in stacks)
    assert len({len(stack) for stack in stacks}) > 1
    for recipe, user in (("misspelt", "{text}"), ("last_message", "{text}")):
        bounded = Task(recipe=recipe, user=user, characters=(60, 70))
        assert all(60 <= len(prompt.source_text) <= 70 for prompt in build(tasks={"short": bounded}))
    named = TASKS["summary"].model_copy(update={"messages": (2, 5), "characters": (60, 400)})
    assert build(tasks={"summary": named}) == build(tasks={"summary": TASKS["summary"]})


# --- a user's own task ---------------------------------------------------------------------------------------------


def own_task(path: Path) -> Mapping[str, Task]:
    return {"mine": Task(recipe="jsonl", path=str(path), user="{question} {text}")}


def rows(count: int, **more: object) -> list[Mapping[str, object]]:
    rng = random.Random(count)
    return [{"question": f"q{number}", "text": sentence(rng), **more} for number in range(count)]


def test_a_users_rows_are_split_in_the_ratio_of_the_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", rows(64))
    counts = Counter(prompt.split for prompt in build(data_params(400, 80, 160), tasks=own_task(path)))
    assert counts == {"train": 40, "validation": 8, "test": 16}
    assert build(data_params(400, 80, 160), tasks=own_task(path)) == build(
        data_params(400, 80, 160), tasks=own_task(path)
    )


def test_three_rows_are_enough_and_two_are_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", rows(3))
    assert Counter(prompt.split for prompt in build(tasks=own_task(path))) == dict.fromkeys(SPLITS, 1)
    path = write_jsonl(tmp_path / "mine.jsonl", rows(2))
    with pytest.raises(UserError, match="task mine") as caught:
        build(tasks=own_task(path))
    assert "mine.jsonl" in caught.value.do


def test_a_row_may_give_a_choice_or_leave_it_out(tmp_path: Path) -> None:
    wish = "with every name and every date kept just as it is"  # long enough to look like a copied run of words
    task = Task(recipe="jsonl", path=str(tmp_path / "mine.jsonl"), user="{text} {wish}", choices={"wish": (wish, "no")})
    given = rows(60)
    write_jsonl(
        tmp_path / "mine.jsonl", [{**row, "wish": "mine"} if at % 3 == 0 else row for at, row in enumerate(given)]
    )
    prompts = build(tasks={"mine": task})
    assert len(prompts) == 32, "a wish that rows share makes none of them a copy"
    assert {prompt.slots["wish"] for prompt in prompts} == {"mine", wish, "no"}
    assert all(prompt.source_text == prompt.slots["text"] for prompt in prompts)
    write_jsonl(tmp_path / "mine.jsonl", [given[0], {**given[0], "wish": "mine"}])
    assert len({row.group for row in recipes.jsonl(tmp_path / "mine.jsonl", ("text", "wish"), ("wish",))}) == 1
    write_jsonl(tmp_path / "mine.jsonl", [*given, {**given[0], "wish": " "}])
    with pytest.raises(UserError, match="wish is not a text"):
        build(tasks={"mine": task})


def test_rows_of_one_group_stay_together_over_all_tasks(tmp_path: Path) -> None:
    grouped = [{**row, "group": f"g{number // 4}"} for number, row in enumerate(rows(40))]
    first, second = write_jsonl(tmp_path / "a.jsonl", grouped), write_jsonl(tmp_path / "b.jsonl", grouped[::-1])
    tasks = {"a": own_task(first)["mine"], "other": own_task(second)["mine"]}
    splits = defaultdict(set)
    for prompt in build(tasks=tasks):
        splits[prompt.group].add(prompt.split)
    assert len(splits) == 10
    assert all(len(found) == 1 for found in splits.values())


def test_a_users_task_lives_beside_the_built_in_ones(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", rows(30))
    prompts = build(tasks={**TASKS, **own_task(path)})
    alone = build()
    assert [p for p in prompts if p.task != "mine" and p.split == "train"] == [p for p in alone if p.split == "train"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q", "text": ', "line 2 is not valid JSON"),
        ('["q", "t"]', "line 2 is not a JSON object"),
        ('{"question": "q", "txt": "t"}', "line 2 lacks text"),
        ('{"question": "q", "text": 3}', "line 2: text is not a text"),
        ('{"question": " ", "text": "t"}', "line 2: question is not a text"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "q", "text": "t"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=said):
        build(tasks=own_task(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "is missing"), (b"\n \n", "holds no row"), (b"\xff\xfe", "not UTF-8"), ("folder", "is a folder")],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes | str | None, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    if isinstance(content, str):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        build(tasks=own_task(path))
