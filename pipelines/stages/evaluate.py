"""Stage `evaluate`: live acceptance of the head on held-out prompts, and token-exact comparison, in torch."""

from __future__ import annotations

from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.core.host import allowed_cores, host_card
from components.core.manifest import read_policies
from components.core.paths import BACKBONE, EVALUATION_REPORT, HEAD, POLICY, PROMPTS, TEMPLATES
from components.core.progress import Progress
from components.data.table import first_of_each_task, read_prompts
from components.decoding.bootstrap import Bootstrap
from components.decoding.branching import Shape
from components.decoding.comparison import check_wiring
from components.decoding.outcomes import Outcome, mode_lines, mode_rows, total_acceptance
from components.modeling.evaluation import TREE, compare_prompts
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write evaluation.json."""
    params = stage_params("evaluate")
    settings, policies = params.evaluate, read_policies(POLICY)
    chosen = first_of_each_task(read_prompts(PROMPTS), "test", settings.prompts_per_task)
    progress, results = Progress("evaluate", len(chosen), "prompts"), {}
    rows, shape = params.runtime.max_length, Shape(**settings.tree.model_dump())
    compared = compare_prompts(chosen, BACKBONE, HEAD, TEMPLATES, rows, policies, shape, allowed_cores())
    for outcomes in compared:
        results[outcomes[policies.default].prompt_id] = outcomes
        progress.advance()
    by_mode: dict[str, list[Outcome]] = {
        mode: [results[prompt.prompt_id][mode] for prompt in chosen] for mode in (*policies.modes, TREE)
    }
    for mode, of_mode in by_mode.items():
        total = total_acceptance(of_mode)
        check_wiring(total, total.drafted, f"evaluation, mode {mode}")
    figures = mode_rows(by_mode, policies.default, Bootstrap(settings.bootstrap_samples, settings.seed))
    numerics = {"threads": 1, "precision": "float32", "runtime": "torch", "policies": policies.model_dump()}
    numerics |= {"tree": settings.tree.model_dump()}
    created = host_card("torch", "transformers").as_dict() | numerics
    write_json(EVALUATION_REPORT, {"created_with": created, **figures})
    print(f"evaluate: {mode_lines(figures)} in torch")


if __name__ == "__main__":
    main()
