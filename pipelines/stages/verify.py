"""Stage `verify`: decode test prompts with and without drafts in the bundle; list every token that differs."""

from __future__ import annotations

from components.core import paths
from components.core.errors import exits_cleanly
from components.core.files import write_json
from components.data.table import read_prompts
from components.decoding.bootstrap import Bootstrap
from components.decoding.outcomes import mode_lines, mode_rows
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
    rows = mode_rows(verify_bundle(bundle, prompts), bundle.manifest.policies.default, bootstrap)
    write_json(
        paths.VERIFICATION_REPORT, {"created_with": created_with(bundle), "bundle_sha256": bundle.sha256, **rows}
    )
    print(f"verify: {mode_lines(rows)} ({bundle.threads} threads, {bundle.manifest.precision})")


if __name__ == "__main__":
    main()
