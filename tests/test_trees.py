"""Trees of drafts and Jacobi drafts: the plain text whatever is guessed, and the cache of a plain pass behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import UserError
from components.decoding.branching import Shape, TreeDrafter
from components.decoding.jacobi import JacobiDrafter
from components.decoding.loop import Drafter, Round, TreeBackbone, decode_greedy, decode_with_drafts
from components.decoding.metrics import count_rounds
from components.decoding.relaxed import Relaxed
from components.decoding.sampling import Sampling
from components.decoding.stopping import Answer, StopRule
from components.decoding.tree import Tree, lineages
from components.modeling.backbone import Backbone
from components.modeling.session import TorchBackbone, TorchHead, cached_rows
from helpers_bundle import Oracle, random_head

VOCABULARY = 9
PROMPT = [1, 3]
TABLE = np.random.default_rng(11).normal(size=(VOCABULARY,) * 3)  # logits by the last two tokens


def text(tokens: Sequence[int]) -> str:
    return "".join("abcdefghi"[token % VOCABULARY] for token in tokens)


class KnownBackbone:
    """The last two tokens of a row's own branch decide; refuses passes that were never settled, and too many rows."""

    def __init__(self, max_length: int = 10_000) -> None:
        self.tokens: list[int] = []
        self.branches: list[list[int]] = []
        self.max_length, self.widths = max_length, list[int]()
        self.last_logits = np.zeros((0, VOCABULARY))

    @property
    def length(self) -> int:
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> int:
        self.tokens, self.branches = list(tokens), []
        return self._choose([list(tokens)])[0]

    rewind = prefill

    def verify(self, tokens: Sequence[int]) -> list[int]:
        return self.verify_tree(tokens, range(len(tokens) - 1))

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        assert not self.branches, "the last pass was never settled with keep()"
        assert len(tokens) == len(parents) + 1 and self.length + len(tokens) <= self.max_length
        self.widths.append(len(tokens))
        self.branches = [[*self.tokens, *(tokens[row] for row in lineage)] for lineage in lineages(parents)]
        return self._choose(self.branches)

    def narrow(self, rows: Sequence[int]) -> None:
        self.branches = [self.branches[row] for row in rows]
        self.last_logits = self.last_logits[list(rows)]

    def keep(self, rows: int) -> None:
        assert 1 <= rows <= len(self.branches)
        assert all(self.branches[row][:-1] == self.branches[row - 1] for row in range(1, rows)), "not one path"
        self.tokens, self.branches = self.branches[rows - 1], []

    def _choose(self, contexts: list[list[int]]) -> list[int]:
        self.last_logits = np.stack([TABLE[context[-2], context[-1]] for context in contexts])
        return [int(token) for token in self.last_logits.argmax(axis=-1)]


class PathsOnly(KnownBackbone):
    """A runtime without a tree mask."""

    verify_tree = None  # type: ignore[assignment]

    def verify(self, tokens: Sequence[int]) -> list[int]:
        return KnownBackbone.verify_tree(self, tokens, range(len(tokens) - 1))


@dataclass
class RandomTrees:
    """Grows trees at random; a draft is right behind its parent as often as ``right`` says."""

    truth: Sequence[int]
    prompt: int
    right: float
    seed: int
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)

    def propose(self, tokens: Sequence[int], limit: int) -> Tree:
        drafts, parents, depths = list[int](), list[int](), [0]
        at = len(tokens) - self.prompt
        for _ in range(int(self.generator.integers(0, 2 * limit + 1))):
            early = [row for row, depth in enumerate(depths) if depth < limit]
            parents.append(int(self.generator.choice(early)))
            depths.append(depths[parents[-1]] + 1)
            right = self.generator.random() < self.right
            place = at + depths[-1] - 1
            known = right and place < len(self.truth)
            drafts.append(self.truth[place] if known else int(self.generator.integers(0, VOCABULARY)))
        return Tree(tuple(drafts), tuple(parents))


def plain(rule: StopRule, prompt: Sequence[int] = PROMPT) -> Answer:
    answer = Answer(rule, text)
    list(decode_greedy(KnownBackbone(), prompt, answer))
    return answer


def drafted(
    backbone: Any, drafter: Drafter, rule: StopRule, limit: int = 7, prompt: Sequence[int] = PROMPT
) -> tuple[Answer, list[Round]]:
    answer = Answer(rule, text)
    return answer, list(decode_with_drafts(backbone, drafter, prompt, answer, limit))


def budget(tokens: int) -> StopRule:
    return StopRule(frozenset(), (), tokens)


def fixed(*trees: Tree | list[int]) -> Drafter:
    """Proposes these, one a round, then nothing."""

    class Fixed:
        waiting: Iterator[Tree | list[int]] = iter(trees)

        def propose(self, tokens: Sequence[int], limit: int) -> Tree | list[int]:
            return next(self.waiting, [])

    return Fixed()


# --- the value --------------------------------------------------------------------------------------------------------


def test_a_draft_needs_a_parent_in_an_earlier_row() -> None:
    for tokens, parents in (((5,), (1,)), ((5, 6), (0,)), ((5, 6), (0, -1)), ((5, 6, 7), (0, 2, 2))):
        with pytest.raises(ValueError, match="parent in an earlier row"):
            Tree(tokens, parents)
    assert Tree((), ()).is_path and Tree((5, 6), (0, 1)).is_path and not Tree((5, 6), (0, 0)).is_path


def test_the_branch_goes_where_the_backbone_goes_and_ends_with_what_it_refuses() -> None:
    tree = Tree((4, 5, 6, 7, 8), (0, 0, 2, 2, 4))  # 4 | 5 -> 6 | 7 -> 8
    assert tree.branch([5, 9, 7, 9, 8, 9]) == [0, 2, 4, 5]
    assert tree.branch([5, 9, 7, 9, 3, 9]) == [0, 2, 4, 5], "8 was refused"
    assert tree.branch([5, 9, 3, 9, 9, 9]) == [0, 2, 3], "of two refused the likelier"
    assert tree.branch([4, 9, 9, 9, 9, 9]) == [0, 1], "nothing stood behind 4"
    assert tree.branch([1, 9, 9, 9, 9, 9]) == [0, 1]
    assert lineages(tree.parents) == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [0, 2, 4, 5]]


# --- the loop ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    right=st.sampled_from([0.0, 0.3, 0.6, 0.9]),
    prompt=st.lists(st.integers(0, 8), min_size=2, max_size=5),
    limit=st.integers(1, 8),
    tokens=st.integers(1, 40),
    eos=st.frozensets(st.integers(0, 8), max_size=2),
    stop=st.sampled_from(["", "ab", "c", "dda"]),
    room=st.integers(0, 50),
)
def test_no_tree_changes_the_tokens(
    seed: int, right: float, prompt: list[int], limit: int, tokens: int, eos: frozenset[int], stop: str, room: int
) -> None:
    """Also where the answer ends inside an accepted branch, and where hardly a row is left."""
    truth = plain(budget(60), prompt).tokens
    rule = StopRule(eos, (stop,) if stop else (), tokens)
    backbone = KnownBackbone(len(prompt) + tokens + room)
    answer, rounds = drafted(backbone, RandomTrees(truth, len(prompt), right, seed), rule, limit, prompt)
    assert answer == plain(rule, prompt)
    assert len(answer.tokens) <= tokens
    widths = [1 + len(one.drafted) + one.aside for one in rounds[1:]]
    assert widths == backbone.widths and all(width <= 2 * limit + 1 for width in widths)
    counts = count_rounds(rounds)
    assert counts.drafted == sum(widths) - len(widths)
    assert sum(counts.accepted) == sum(one.accepted for one in rounds)


def test_a_second_choice_is_accepted_where_a_path_stops() -> None:
    truth = plain(budget(8)).tokens
    wrong = [(token + 1) % VOCABULARY for token in truth]
    path = [wrong[1], truth[2], truth[3]]
    tree = Tree((wrong[1], truth[1], wrong[2], truth[2], truth[3]), (0, 0, 2, 2, 4))
    answer, (_, first, *_) = drafted(KnownBackbone(), fixed(tree), budget(8))
    assert first == Round(tuple(truth[1:5]), tuple(truth[1:4]), 3, aside=2)
    _, (_, missed, *_) = drafted(KnownBackbone(), fixed(path), budget(8))
    assert (missed.emitted, missed.accepted) == ((truth[1],), 0)
    assert answer.tokens == truth


def test_the_end_inside_an_accepted_branch_is_the_end() -> None:
    truth = plain(budget(9)).tokens
    at = next(index for index in range(2, 9) if truth[index] not in truth[:index])
    tree = Tree(((truth[1] + 1) % VOCABULARY, *truth[1 : at + 3]), (0, 0, *range(2, at + 3)))
    for rule in (StopRule(frozenset(truth[at : at + 1]), (), 50), budget(at + 1)):
        answer, rounds = drafted(KnownBackbone(), fixed(tree), rule, 12)
        assert answer.tokens == truth[: at + 1]
        assert rounds[-1].accepted == len(rounds[-1].emitted) == at
        assert sum(count_rounds(rounds).reached) == at, "what lay behind the end was never needed"


def test_a_path_given_as_a_tree_is_a_path() -> None:
    """The same rounds, from backbones and under rules that refuse trees."""
    truth = plain(budget(12)).tokens
    path = [*truth[1:3], (truth[3] + 1) % VOCABULARY]
    tree = Tree(tuple(path), (0, 1, 2))
    for rule in (Relaxed(0.01), Sampling(0.0), Sampling(1e-4)):
        rounds = [
            list(decode_with_drafts(PathsOnly(), fixed(way), PROMPT, Answer(budget(12), text), 7, rule))
            for way in (path, tree)
        ]
        assert rounds[0] == rounds[1]
        assert rounds[0][1] == Round(tuple(truth[1:4]), tuple(path), 2)


def test_trees_are_refused_by_name() -> None:
    fork = Tree((4, 5), (0, 0))
    for rule in (Relaxed(0.5), Sampling(0.7)):
        with pytest.raises(ValueError, match="sampling and relaxed acceptance need a path"):
            list(decode_with_drafts(KnownBackbone(), fixed(fork), PROMPT, Answer(budget(9), text), 7, rule))
    list(decode_with_drafts(KnownBackbone(), fixed(fork), PROMPT, Answer(budget(9), text), 7, Sampling(0.0)))

    class Small:
        """Neither verify_tree nor narrow."""

        max_length, length, last_logits = 99, 2, ()

        def prefill(self, tokens: Sequence[int]) -> int:
            return 1

        rewind = prefill

        def verify(self, tokens: Sequence[int]) -> list[int]:
            raise AssertionError("a tree is no path")

        def keep(self, rows: int) -> None: ...

    assert isinstance(KnownBackbone(), TreeBackbone)
    with pytest.raises(UserError, match="Small cannot verify a tree"):
        drafted(Small(), fixed(fork), budget(9))


# --- which drafts make up the tree ------------------------------------------------------------------------------------


class TableHead:
    """Its state is the chain so far; the distribution behind a chain comes from its hash."""

    first_state: tuple[int, ...] = ()

    def __init__(self, seed: int, sharpness: float) -> None:
        self.seed, self.sharpness, self.calls = seed, sharpness, list[int]()

    def after(self, chain: Sequence[int]) -> list[tuple[int, float]]:
        logits = np.random.default_rng([self.seed, *chain]).normal(size=VOCABULARY) * self.sharpness
        shares = np.exp(logits) / np.exp(logits).sum()
        return [(int(token), float(shares[token])) for token in np.argsort(-shares)]

    def expand(self, tokens: Sequence[int], states: Sequence[Any], count: int) -> list[Any]:
        self.calls.append(len(tokens))
        chains = [(*state, token) for token, state in zip(tokens, states, strict=True)]
        return [(chain, self.after(chain)[:count]) for chain in chains]


def best_first(head: TableHead, newest: int, shape: Shape, eos: int) -> set[tuple[int, ...]]:
    """The textbook search: take the likeliest chain on the edge, put its children there."""
    edge, chosen = [(1.0, (newest,))], set[tuple[int, ...]]()
    while edge and len(chosen) <= shape.nodes:
        edge.sort(reverse=True)
        joint, chain = edge.pop(0)
        chosen.add(chain)
        if len(chain) <= shape.depth and (len(chain) == 1 or chain[-1] != eos):
            children = head.after(chain)[: shape.branches]
            edge += [(joint * p, (*chain, token)) for token, p in children if joint * p >= shape.least]
    return chosen - {(newest,)}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sharpness=st.sampled_from([0.3, 1.0, 3.0]),
    nodes=st.integers(1, 9),
    depth=st.integers(1, 5),
    branches=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_level_by_level_finds_the_tree_of_best_first_search(
    seed: int, sharpness: float, nodes: int, depth: int, branches: int, least: float
) -> None:
    head, shape = TableHead(seed, sharpness), Shape(nodes, depth, branches, least)
    tree = TreeDrafter(head, shape, (4,)).propose([7, 2], 99)
    chains = {tuple([2, *tree.tokens][row] for row in lineage) for lineage in lineages(tree.parents)[1:]}
    assert chains == best_first(head, 2, shape, 4)
    assert len(head.calls) <= depth, "one run of the head for each level"


def test_a_tree_keeps_to_its_limit_and_drafts_nothing_behind_the_end() -> None:
    head = TableHead(3, 1.0)
    trees = [TreeDrafter(head, Shape(30, 4, 2), ()).propose([2], limit) for limit in (1, 2, 3, 9)]
    assert [max(map(len, lineages(tree.parents))) - 1 for tree in trees] == [1, 2, 3, 4], "chains, not drafts, are cut"
    assert [len(tree) for tree in trees] == [2, 6, 14, 30]
    ended = TreeDrafter(head, Shape(7, 4, 3), range(VOCABULARY)).propose([2], 7)
    assert ended.parents == (0, 0, 0), "every first draft ends the answer"
    path = TreeDrafter(head, Shape(4, 4, 1), ()).propose([2], 7)
    assert path.is_path and len(path) == 4


def test_what_the_text_repeats_is_one_more_branch() -> None:
    """It shares the drafts that the head made too, stops behind the end, and keeps to the limit."""
    context, ends = [3, 1, 4, 1, 5, 2, 3, 1], (2,)
    plain = TreeDrafter(TableHead(3, 1.0), Shape(4, 2, 2), ends).propose(context, 99)
    mixed = TreeDrafter(TableHead(3, 1.0), Shape(4, 2, 2, copied=5, lookup_ngram=2), ends)
    tree = mixed.propose(context, 99)
    assert (tree.tokens[:4], tree.parents[:4]) == (plain.tokens, plain.parents)
    chains = [[tree.tokens[row - 1] for row in lineage[1:]] for lineage in lineages(tree.parents)]
    assert [4, 1, 5, 2] in chains, "what followed `3 1` before, up to the end of sequence"
    assert len({tuple(chain) for chain in chains}) == len(chains), "no draft stands twice"
    short = mixed.propose(context, 1)
    assert set(short.parents) == {0} and 4 in short.tokens, "one draft a chain, the copied one among them"
    assert tree.first(5) == Tree(tree.tokens[:5], tree.parents[:5])
    assert mixed.propose([5, 3, 1], 99) == TreeDrafter(TableHead(3, 1.0), Shape(4, 2, 2), ends).propose([5, 3, 1], 99)


# --- Jacobi -----------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 8), min_size=2, max_size=6),
    limit=st.integers(1, 7),
    tokens=st.integers(1, 50),
    eos=st.frozensets(st.integers(0, 8), max_size=1),
    room=st.integers(0, 20),
    ngram=st.integers(2, 4),
)
def test_jacobi_never_changes_the_tokens(
    prompt: list[int], limit: int, tokens: int, eos: frozenset[int], room: int, ngram: int
) -> None:
    rule, backbone = StopRule(eos, (), tokens), KnownBackbone(len(prompt) + tokens + room)
    drafter = JacobiDrafter(backbone, ngram)
    first, rounds = drafted(backbone, drafter, rule, limit, prompt)
    again, same_rounds = drafted(backbone, drafter, rule, limit, prompt)
    assert first == again == plain(rule, prompt)
    assert rounds == same_rounds, "an answer learns nothing from another"


def test_choices_behind_a_wrong_draft_are_the_next_guesses_and_the_pool_goes_before_them() -> None:
    backbone = KnownBackbone()
    drafter = JacobiDrafter(backbone, 3)
    context = [*PROMPT, backbone.prefill(PROMPT)]
    assert drafter.propose(context, 3) == [context[-1]] * 3, "nothing is known yet"

    def round_of(best: list[int], added: int) -> list[int]:
        backbone.last_logits = np.eye(20)[best]
        context.extend(best[:added])
        return drafter.propose(context, 3)

    start = context[-1]
    assert start not in (11, 12, 13, 14)
    drafts = round_of([11, 12, 13, 14], 1)
    assert drafts == [12, 13, 14], "moved up by one place"
    assert round_of([15, 16, 17, 18], 1) == [16, 17, 18]
    # 15 was followed by 12's guess; now 11 comes again, and behind it stands what the backbone chose there.
    assert round_of([11, 5, 6, 7], 1)[:1] == [15]
    backbone.prefill([8, 8])
    assert drafter.propose([8, 8, 11], 2) == [11, 11], "a new answer forgets"


def test_jacobi_needs_fewer_passes_where_the_text_repeats() -> None:
    rule = budget(60)  # 81 states at most: the text of a table soon goes round in a circle
    backbone = KnownBackbone()
    answer, rounds = drafted(backbone, JacobiDrafter(backbone, 3), rule, 4)
    assert answer == plain(rule)
    assert count_rounds(rounds).acceptance_length > 1.5


# --- the torch session ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, 300, (3 + i % 9,), generator=generator).tolist() for i in range(count)]


@dataclass
class Bushy:
    """The right path among wrong siblings and wrong children, right for as many drafts as it is told."""

    oracle: Oracle
    right: int

    def propose(self, tokens: Sequence[int], limit: int) -> Tree:
        path = self.oracle.propose(tokens, limit)
        drafts, parents, parent = list[int](), list[int](), 0
        for depth, token in enumerate(path[: limit // 2]):
            wrong = (token + 1 + depth) % 300
            drafts += [wrong, token if depth < self.right else (token + 7) % 300]
            parents += [parent, parent]
            parent = len(drafts)
        return Tree(tuple(drafts), tuple(parents))


def test_a_pass_over_a_tree_leaves_the_rows_of_a_plain_pass(backbone: Backbone) -> None:
    """Keys, values, hidden states and choices, for a branch that is neither first nor in neighbouring rows."""
    prompt = [5, 60, 7, 80]
    session, clean = TorchBackbone(backbone, 64), TorchBackbone(backbone, 64)
    newest = session.prefill(prompt)
    assert clean.prefill(prompt) == newest
    tokens, parents = [newest, 31, 32, 41, 42, 51, 43], (0, 0, 1, 2, 3, 4)  # 31 -> 41 -> 51 and 32 -> 42 -> 43
    best = session.verify_tree(tokens, parents)
    session.narrow([0, 2, 4, 6])
    assert clean.verify([newest, 32, 42, 43]) == [best[row] for row in (0, 2, 4, 6)]
    torch.testing.assert_close(session.last_logits, clean.last_logits, rtol=1e-5, atol=1e-5)
    for one in (session, clean):
        one.keep(3)
    assert session.length == clean.length == len(prompt) + 3
    torch.testing.assert_close(session.hidden, clean.hidden, rtol=1e-5, atol=1e-5)
    for layer in range(backbone.card.layers):
        for mine, wanted in zip(cached_rows(session.cache, layer), cached_rows(clean.cache, layer), strict=True):
            assert mine.shape == wanted.shape
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    assert session.verify([9]) == clean.verify([9])


def answers(backbone: Backbone, decode: Any, prompt: list[int], make: Any, room: int = 40) -> tuple[Any, Any, Any]:
    """Plain and drafted answer of 14 tokens, and the rounds."""
    rule, session = budget(14), TorchBackbone(backbone, len(prompt) + room)
    reference, answer = Answer(rule, decode), Answer(rule, decode)
    list(decode_greedy(session, prompt, reference))
    rounds = list(decode_with_drafts(session, make(session, reference.tokens), prompt, answer, 7))
    return reference.tokens, answer.tokens, rounds


@pytest.mark.parametrize("right", [0, 1, 2, 9])
@pytest.mark.parametrize("room", [14, 17, 40])
def test_trees_give_the_plain_text_in_torch(backbone: Backbone, decode: Any, right: int, room: int) -> None:
    accepted = 0
    for prompt in prompts(5):

        def make(_: TorchBackbone, truth: Sequence[int], prompt: list[int] = prompt) -> Drafter:
            return Bushy(Oracle(prompt, truth, 300), right)

        plain, tokens, rounds = answers(backbone, decode, prompt, make, room)
        assert tokens == plain
        accepted += sum(one.accepted for one in rounds)
    assert (accepted > 0) is (right > 0)


def test_the_head_drafts_the_same_in_a_tree_and_alone(backbone: Backbone) -> None:
    """One branch is the path; with several, each node's children are those of a path that went there."""
    session = TorchBackbone(backbone, 64)
    head = TorchHead(random_head(backbone), session)
    newest = session.prefill([5, 60, 7, 80])
    path = [token for token, _ in zip((draft for draft, _ in head.drafts(newest)), range(4), strict=False)]
    assert list(TreeDrafter(head, Shape(4, 4, 1), ()).propose([newest], 4)) == path
    ((state, first),) = head.expand([newest], [head.first_state], 3)
    together = head.expand([token for token, _ in first], [state] * 3, 2)
    for (token, _), (mine, drafts) in zip(first, together, strict=True):
        ((alone, wanted),) = head.expand([token], [state], 2)
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)
        assert [one for one, _ in drafts] == [one for one, _ in wanted]


@pytest.mark.parametrize("way", ["tree", "jacobi"])
def test_the_ways_give_the_plain_text_in_torch(backbone: Backbone, decode: Any, way: str) -> None:
    head = random_head(backbone)

    def make(session: TorchBackbone, truth: Sequence[int]) -> Drafter:
        tree = TreeDrafter(TorchHead(head, session), Shape(7, 4, 3), backbone.card.eos_ids)
        return tree if way == "tree" else JacobiDrafter(session, 3)

    for prompt in prompts(8):
        plain, tokens, rounds = answers(backbone, decode, prompt, make)
        assert tokens == plain
        assert max(1 + len(one.drafted) + one.aside for one in rounds) == 8
