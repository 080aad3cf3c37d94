"""Stage `verify`: decode test prompts with and without drafts in the bundle; list every token that differs."""

from __future__ import annotations

from components.core import paths
from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.data.table import read_prompts
from components.decoding.bootstrap import Bootstrap
from components.decoding.outcomes import summary_rows
from components.devices.circumstances import created_with
from components.devices.verification import check_prompt_ids, first_test_prompts, verify_bundle
from components.onnx.runtime import open_bundle
from pipelines.stages.common import stage_params


@exits_cleanly
def main() -> None:
    """Write models/reports/verification.json."""
    params = stage_params("verify")
    bundle = open_bundle(paths.BUNDLE, params.runtime.threads)
    prompts = first_test_prompts(read_prompts(paths.PROMPTS), params.verify.prompts_per_task)
    check_prompt_ids(bundle, prompts)
    bootstrap = Bootstrap(params.evaluate.bootstrap_samples, params.evaluate.seed)
    rows, overall = summary_rows(verify_bundle(bundle, prompts), bootstrap)
    report = {"created_with": created_with(bundle), "bundle_sha256": bundle.sha256, "tasks": rows, "overall": overall}
    write_json(paths.VERIFICATION_REPORT, report)
    print(
        f"verify: {overall['prompts']} prompts, exact match {overall['exact_match']:.2%}, "
        f"{overall['acceptance_length']:.2f} tokens per pass ({bundle.threads} threads, {bundle.manifest.precision})"
    )


if __name__ == "__main__":
    main()
