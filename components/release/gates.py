"""The decision to release: a pure function from evidence to a verdict with reasons.

Owns the rules, and does no input or output. It refuses to guess: evidence that is missing, unreadable, not a finite
number or about another bundle fails its rule with the reason. Its surprising decision: a rule is a row (name, where the
value stands, bound, test), so every row is always evaluated and shown, passed or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from components.core.config import Gates
from components.release.evidence import Evidence, Source, Unusable, finite

Value = float | str | bool | None
ABOUT_BUNDLE = ("export", "verification", "benchmark")
PER_TASK = ("evaluation", "verification", "benchmark")


@dataclass(frozen=True)
class RuleResult:
    """One row of the verdict; ``reason`` is empty when the rule passed."""

    rule: str
    value: Value
    bound: Value
    passed: bool
    source: str
    source_sha256: str
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether a bundle may be released, and why."""

    passed: bool
    bundle_sha256: str
    rules: tuple[RuleResult, ...]

    @property
    def refusals(self) -> tuple[RuleResult, ...]:
        """The rules that failed."""
        return tuple(rule for rule in self.rules if not rule.passed)

    def as_dict(self, created_with: Mapping[str, object]) -> dict[str, object]:
        """The document of gate.json."""
        rules = [asdict(rule) for rule in self.rules]
        head = {"created_with": dict(created_with), "passed": self.passed, "bundle_sha256": self.bundle_sha256}
        return head | {"rules": rules}


@dataclass(frozen=True)
class _Rule:
    name: str
    source: Source
    bound: Value
    read: Callable[[], Value]
    holds: Callable[[Any], bool]


def decide(evidence: Evidence, gates: Gates) -> Decision:
    """Apply every rule.

    Args:
        evidence: what the stages wrote.
        gates: floors from params.yaml.

    Returns:
        The decision; it names the bundle that it is about by the hash of its manifest ("" without one).
    """
    results = tuple(_apply(rule) for rule in _rules(evidence, gates))
    return Decision(all(result.passed for result in results), evidence.manifest.sha256, results)


def _apply(rule: _Rule) -> RuleResult:
    value: Value
    try:
        value = rule.read()
        passed = bool(rule.holds(value))
        reason = "" if passed else f"{value} does not meet {rule.bound}"
    except Unusable as error:
        value, passed, reason = None, False, f"{rule.source.path}: {error}"
    return RuleResult(rule.name, value, rule.bound, passed, rule.source.path, rule.source.sha256, reason)


def _rules(evidence: Evidence, gates: Gates) -> Iterator[_Rule]:
    tasks = _known_tasks(evidence)
    yield from _identity_rules(evidence)
    yield from _contract_rules(evidence)
    verification, benchmark = evidence.verification, evidence.benchmark
    yield from (_exact_match(verification, task, gates.exact_match) for task in tasks)
    every_mode = _reader(_least_exact_mode, evidence)
    yield _Rule("exact match, every mode", verification, gates.exact_match, every_mode, _at_least(gates.exact_match))
    # Prompt lookup needs no head: a head that drafts nothing right must not be released on lookup's merit.
    for key in ("extra_tokens_per_pass", "head_extra_tokens_per_pass"):
        yield _floor(verification, key, None, gates.extra_tokens_per_pass_overall)
        yield from (_floor(verification, key, task, gates.extra_tokens_per_pass_task) for task in tasks)
    # Timed answers are answers too: a mode that differs from greedy in any repeat was not exact.
    yield _Rule("timed answers equal greedy", benchmark, 0, _reader(_timed_mismatches, benchmark), _equals(0))
    yield _floor(benchmark, "speedup", None, gates.speedup_overall)
    yield from (_floor(benchmark, "speedup", task, gates.speedup_task) for task in tasks)


def _known_tasks(evidence: Evidence) -> list[str]:
    """The bundle's tasks and any other that evidence speaks of: a surplus task is judged, not overlooked."""
    names: set[str] = set()
    for read in (lambda: evidence.manifest.names("tasks"), *(getattr(evidence, name).tasks for name in PER_TASK)):
        try:
            names.update(read())
        except Unusable:
            continue
    return sorted(names)


def _identity_rules(evidence: Evidence) -> Iterator[_Rule]:
    """The frozen model stayed frozen; all evidence speaks of one bundle, its tasks and one numeric mode."""
    manifest, training = evidence.manifest, evidence.training
    frozen = _quoted(lambda: manifest.text("backbone", "weights_sha256"))
    for when in ("before", "after"):
        key = f"backbone_sha256_{when}"
        yield _Rule(f"backbone {when} training", training, frozen, _reader(training.text, key), _equals(frozen))
    for name in ABOUT_BUNDLE:
        source: Source = getattr(evidence, name)
        bound, read = manifest.sha256 or None, _reader(source.text, "bundle_sha256")
        yield _Rule(f"{name} is about this bundle", source, bound, read, _equals(bound))
    bundle_tasks = _quoted(lambda: ", ".join(manifest.names("tasks")))
    for name in PER_TASK:
        source = getattr(evidence, name)
        read = _reader(lambda s: ", ".join(sorted(s.tasks())), source)
        yield _Rule(f"{name} covers the bundle's tasks", source, bundle_tasks, read, _equals(bundle_tasks))
    mode = _quoted(lambda: numeric_mode(evidence.verification))
    read = _reader(numeric_mode, evidence.benchmark)
    yield _Rule("exactness and speed in one numeric mode", evidence.benchmark, mode, read, _equals(mode))


def numeric_mode(source: Source) -> str:
    """Precision, threads, processor and runtime that a figure was taken with: a pass in one is no pass in another."""
    precision, cpu = source.text("created_with", "precision"), source.text("created_with", "cpu")
    threads = int(finite(source.at("created_with", "threads"), "created_with.threads"))
    runtime = source.text("created_with", "packages", "onnxruntime")
    return f"{precision}, {threads} threads, {cpu}, onnxruntime {runtime}"


def _timed_mismatches(source: Source) -> int:
    listed = source.at("overall", "mismatches")
    if not isinstance(listed, list):
        raise Unusable(f"overall.mismatches is {listed!r}, not a list")
    return len(listed)


def _least_exact_mode(evidence: Evidence) -> float:
    """A bundle decodes under any of its policies: none of them may change a token."""
    source, modes = evidence.verification, evidence.manifest.names("policies", "modes")
    if source.names("modes") != modes:
        raise Unusable(f"modes verified: {', '.join(source.names('modes'))}; of the bundle: {', '.join(modes)}")
    shares = []
    for mode in modes:
        if finite(source.at("modes", mode, "overall", "prompts"), f"modes.{mode}.prompts") < 1:
            raise Unusable(f"mode {mode} was verified on no prompt")
        share = finite(source.at("modes", mode, "overall", "exact_match"), f"modes.{mode}.exact_match")
        shares.append(share if source.at("modes", mode, "overall", "mismatches") == [] else min(share, 0.999999))
    return min(shares)


def _contract_rules(evidence: Evidence) -> Iterator[_Rule]:
    for name in ("prompts", "distilled"):
        source: Source = getattr(evidence, name)
        yield _Rule(f"data contract of {name}", source, True, _reader(_contract_passed, source), _equals(True))
    export = evidence.export
    yield _Rule("bundle equals torch", export, True, _reader(export.at, "parity", "passed"), _equals(True))


def _contract_passed(source: Source) -> bool:
    """A contract passes with rows, with rules, and with every rule kept."""
    rules = source.at("expectations")
    if finite(source.at("rows"), "rows") < 1 or not isinstance(rules, list) or not rules:
        raise Unusable("the contract was checked on no rows or with no rules")
    kept = all(isinstance(rule, Mapping) and rule.get("passed") is True for rule in rules)
    return kept and source.at("passed") is True


def _exact_match(source: Source, task: str, bound: float) -> _Rule:
    def read() -> float:
        share = source.task_number(task, "exact_match")
        listed = source.tasks()[task].get("mismatches", [])
        if not isinstance(listed, list) or (listed and share >= 1.0):
            raise Unusable(f"{task} claims exact_match {share:g} beside its list of mismatches")
        return share

    return _Rule(f"exact match, {task}", source, bound, read, _at_least(bound))


def _floor(source: Source, key: str, task: str | None, bound: float) -> _Rule:
    """A figure of one task, or of all together, that must reach ``bound``."""

    def read() -> float:
        if task is not None:
            return source.task_number(task, key)
        return finite(source.at("overall", key), f"overall.{key}")

    return _Rule(f"{key.replace('_', ' ')}, {task or 'overall'}", source, bound, read, _at_least(bound))


def _reader(function: Callable[..., Value], *arguments: Any) -> Callable[[], Value]:
    return lambda: function(*arguments)


def _equals(bound: Value) -> Callable[[Any], bool]:
    """Equality to a bound that is known: an unknown bound is met by nothing."""
    return lambda value: bound is not None and type(value) is type(bound) and value == bound


def _at_least(bound: float) -> Callable[[Any], bool]:
    return lambda value: math.isfinite(bound) and value >= bound


def _quoted(read: Callable[[], str]) -> str | None:
    """A bound that is itself evidence; None when it cannot be read."""
    try:
        return read() or None
    except Unusable:
        return None
