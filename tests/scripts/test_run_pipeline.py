"""The chain SFT, reward model, PPO, DPO, evaluation.

Each starts from the folder that the one before it wrote.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runs import rows_of
from warm import warm_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_parts_fit_together_and_dpo_learns(tmp_path):
    environment = warm_environment(PYTHONPATH=str(ROOT), NPROC="1")
    command = ["bash", str(ROOT / "scripts" / "run_pipeline.sh"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]

    for name in ("sft", "rm", "ppo", "dpo"):
        assert (tmp_path / name / "model" / "model.safetensors").is_file()
    for row in rows_of(tmp_path / "ppo"):
        assert row["rollout/reward_of_model"] == pytest.approx(row["rollout/reward"])

    after = {
        stage: json.loads((tmp_path / f"eval_after_{stage}" / "evaluation.json").read_text())
        for stage in ("sft", "ppo", "dpo")
    }
    for stage, found in after.items():
        assert f"  after {stage}  {found['accuracy']:.3f}" in done.stdout
    assert after["dpo"]["accuracy_low"] > after["sft"]["accuracy_high"]


def test_a_python_without_torch_is_not_taken_for_an_environment():
    """From the root of a clone `import lightrft` alone succeeds with any Python."""
    for script in sorted((ROOT / "scripts").rglob("*.sh")):
        for question in re.findall(
            r"python3? -c ['\"](import [^'\"]*lightrft[^'\"]*)['\"]", script.read_text()
        ):
            bare = [sys.executable, "-S", "-c", question]
            done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True)
            assert "No module named 'torch'" in done.stderr, script
