"""Data contracts: what must hold of the prompt table and of the distilled answers.

Owns the rules, written as data, and their judgement by Great Expectations with HTML evidence. It refuses what Great
Expectations lets through: a suite without rules, a table without rows, a rule that does not exist. Its surprising
decision: facts that span rows or need the tokenizer (leaks between splits, templates kept) are computed beforehand as
plain columns, so that every rule is a stock expectation and shows in the Data Docs (facts.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.config import SPLITS
from components.core.errors import UserError
from components.core.files import atomic_folder, write_json
from components.core.host import host_card, set_quiet_environment
from components.data.facts import ANSWER_COLUMNS, ANSWER_FACTS, PROMPT_COLUMNS, PROMPT_FACTS

if TYPE_CHECKING:
    import pandas as pd

MIN_LETTER_SHARE = 0.6  # a little below what corpora.is_usable asks of one message: here the names' quotes count too
MAX_LOOP_SHARE = 0.25  # a small backbone loops on some prompts; beyond this the decoding or the template is wrong
MAX_TASK_LOOP_SHARE = 0.5  # smart replies of the default backbone: 0.35; beyond half, what is left is no fair sample
MAX_BLANK_SHARE = 0.05  # now and then the first token ends the answer; often means that the template is wrong
MIN_TASK_COVERAGE = 0.75  # answers a task must keep of its prompts after filtering


@dataclass(frozen=True)
class Rule:
    """One expectation: the name of its class in Great Expectations, and its arguments."""

    expectation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one rule."""

    expectation: str
    column: str
    passed: bool
    observed: str


@dataclass(frozen=True)
class ContractReport:
    """What became of a suite; passed only if there are rows and rules, and every rule passed."""

    suite: str
    passed: bool
    rows: int
    expectations: tuple[Outcome, ...]

    def failed(self) -> tuple[Outcome, ...]:
        """Outcomes that did not pass."""
        return tuple(outcome for outcome in self.expectations if not outcome.passed)


def _column(name: str, column: str, **arguments: Any) -> Rule:
    return Rule(f"ExpectColumn{name}", {"column": column, **arguments})


def _same(column: str, value: object) -> Rule:
    return _column("ValuesToBeInSet", column, value_set=[value])


def _table_rules(columns: Sequence[str]) -> tuple[Rule, ...]:
    """There are rows, exactly these columns, and no nulls (which every other column rule passes over in silence)."""
    return (
        Rule("ExpectTableRowCountToBeBetween", {"min_value": 1}),
        Rule("ExpectTableColumnsToMatchSet", {"column_set": list(columns), "exact_match": True}),
        *(_column("ValuesToNotBeNull", column) for column in columns),
        _column("ValuesToBeUnique", "prompt_id"),
    )


def prompt_rules(tasks: Sequence[str], max_prompt_tokens: int) -> tuple[Rule, ...]:
    """The contract of the prompt table with the columns of :func:`prompt_facts`."""
    return (
        *_table_rules(PROMPT_COLUMNS + PROMPT_FACTS),
        _column("ValuesToBeUnique", "prompt_key"),
        _column("DistinctValuesToEqualSet", "split", value_set=list(SPLITS)),
        _column("DistinctValuesToEqualSet", "task", value_set=list(tasks)),
        _column("ValuesToBeBetween", "prompt_tokens", min_value=1, max_value=max_prompt_tokens),
        _same("length_gap", 0),
        _same("task_splits", len(SPLITS)),
        _same("group_splits", 1),
        _same("shared_ngrams", 0),
        _same("template_kept", "yes"),
        _same("control_token_gap", 0),
        _same("doubled_start", 0),
        _same("broken_characters", 0),
        _column("ValuesToBeBetween", "letter_share", min_value=MIN_LETTER_SHARE),
    )


def answer_rules(tasks: Sequence[str]) -> tuple[Rule, ...]:
    """The contract of the distilled answers with the columns of :func:`answer_facts`."""
    return (
        *_table_rules(ANSWER_COLUMNS + ANSWER_FACTS),
        _column("DistinctValuesToEqualSet", "split", value_set=["train", "validation"]),
        _column("DistinctValuesToEqualSet", "task", value_set=list(tasks)),
        _column("ValuesToBeInSet", "stop_reason", value_set=["eos", "stop_text", "length"]),
        _column("ValuesToBeBetween", "answer_tokens", min_value=1),
        _column("ValuesToBeBetween", "over_budget", max_value=0),
        _column("ValuesToBeBetween", "echo_rate", min_value=0, max_value=1),
        _column("MeanToBeBetween", "blank", max_value=MAX_BLANK_SHARE),
        _column("MeanToBeBetween", "loops", max_value=MAX_LOOP_SHARE),
        _column("ValuesToBeBetween", "task_loop_share", max_value=MAX_TASK_LOOP_SHARE),
        _column("ValuesToBeBetween", "task_coverage", min_value=MIN_TASK_COVERAGE, max_value=1),
        _same("prompt_differs", 0),
        _same("place_taken", 0),
    )


def judge(frame: pd.DataFrame, suite: str, rules: Sequence[Rule], docs: Path) -> ContractReport:
    """Hold ``frame`` against ``rules`` and write Data Docs.

    Args:
        frame: table with facts.
        suite: its name in the report and the docs.
        rules: the contract.
        docs: folder of the HTML, replaced as a whole; its bytes hold times and are no one's input.

    Raises:
        UserError: no rules, or a rule that Great Expectations does not know or cannot read.
    """
    if not rules:
        raise UserError(
            f"the contract {suite} has no rule",
            "an empty suite passes on anything",
            "give it rules in components/data/quality.py",
        )
    set_quiet_environment()
    import great_expectations as gx  # 7 seconds of CPU: only where a contract is judged
    from great_expectations.checkpoint.actions import UpdateDataDocsAction
    from great_expectations.data_context.types.base import ProgressBarsConfig

    expectations = [_expectation(gx.expectations, suite, rule) for rule in rules]
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    batch = (
        context.data_sources.add_pandas("tables").add_dataframe_asset(suite).add_batch_definition_whole_dataframe("all")
    )
    declared = context.suites.add(gx.ExpectationSuite(name=suite, expectations=expectations))
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=suite, data=batch, suite=declared))
    with atomic_folder(docs) as folder:
        store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.resolve())}
        site: Any = {
            "class_name": "SiteBuilder",
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
            "store_backend": store,
        }
        context.add_data_docs_site(site_name="docs", site_config=site)
        action = UpdateDataDocsAction(name="docs", site_names=["docs"])
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(name=suite, validation_definitions=[definition], actions=[action])
        )
        (result,) = checkpoint.run(batch_parameters={"dataframe": frame}).run_results.values()
    outcomes = tuple(_outcome(one) for one in result.results)
    whole = len(outcomes) == len(rules) and len(frame) > 0
    return ContractReport(suite, whole and all(outcome.passed for outcome in outcomes), len(frame), outcomes)


def _expectation(known: Any, suite: str, rule: Rule) -> Any:
    remedy = "correct the rule in components/data/quality.py"
    kind = getattr(known, rule.expectation, None)
    if kind is None:
        raise UserError(f"the contract {suite} names an unknown rule", rule.expectation, remedy)
    try:
        return kind(**rule.arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"the contract {suite} has a broken rule: {rule.expectation}", str(error), remedy) from None


def _outcome(result: Any) -> Outcome:
    arguments = result.expectation_config.kwargs
    seen: Mapping[str, Any] = result.result or {}
    raised = [info for info in _exceptions(result.exception_info) if info.get("raised_exception")]
    if raised:
        observed = str(raised[0].get("exception_message"))[:200]
    elif "unexpected_count" in seen and seen.get("observed_value") is None:
        observed = f"{seen['unexpected_count']} of {seen.get('element_count', 'the values')} unexpected"
    else:
        observed = str(seen.get("observed_value", ""))[:200]
    column = str(arguments.get("column", ""))
    return Outcome(result.expectation_config.type, column, bool(result.success), observed)


def _exceptions(info: Any) -> list[Mapping[str, Any]]:
    """Great Expectations gives one record, or one per metric that failed."""
    return [info] if "raised_exception" in info else list(info.values())


def write_report(path: Path, report: ContractReport) -> None:
    """Write the report as JSON, with the machine and versions that made it."""
    write_json(path, {"created_with": host_card("great_expectations", "pandas", "pyarrow").as_dict(), **asdict(report)})


def require(report: ContractReport, evidence: Path) -> None:
    """Stop on a failed contract.

    Raises:
        UserError: names the failed rules.
    """
    if report.passed:
        return
    failed = [f"{outcome.expectation}({outcome.column}): {outcome.observed}" for outcome in report.failed()]
    shown = "; ".join(failed[:4]) + (f"; and {len(failed) - 4} more" if len(failed) > 4 else "")
    raise UserError(
        f"the data contract {report.suite} failed on {report.rows} rows: "
        f"{len(failed)} of {len(report.expectations)} rules do not hold",
        shown or "no rows",
        f"read {evidence}/index.html, mend the data, then run the same command again",
    )
