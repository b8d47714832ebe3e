"""Why: a number or a picture that is written by hand soon differs from the program."""

import json
import re
from pathlib import Path

from transformers import AutoModelForCausalLM

from lightrft.app.quickstart.inputs import tiny_qwen3
from scripts import quickstart_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_readme_shows_the_recorded_run():
    """The script makes sentence and picture from docs/quickstart.json."""
    of = json.loads(quickstart_page.RECORD.read_text())
    readme = (ROOT / "README.md").read_text()
    assert (
        quickstart_page.with_sentence(readme, of) == readme
        and quickstart_page.sentence(of) in readme
    )
    assert quickstart_page.picture(of) == quickstart_page.PICTURE.read_text()
    assert of["eval_before_sft"] < of["eval_after_sft"] < of["eval_after_rl"]


def test_the_number_of_parameters_is_that_of_the_model(tmp_path):
    count = AutoModelForCausalLM.from_pretrained(tiny_qwen3(tmp_path, seed=0)).num_parameters()
    said = {
        number
        for page in PAGES
        for number in re.findall(r"([\d,.]+ ?M?) (?:million )?parameters", page.read_text())
        if number.startswith(("0.14", "157"))
    }
    assert said == {f"{count:,}"}


def test_a_run_is_recorded(tmp_path):
    rows = [
        {"step": step, "rollout/reward": step / 10, "engine/logprob_mismatch": 1e-6 * step}
        for step in (1, 2)
    ]
    rows[1]["eval/accuracy"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(
        json.dumps(dict.fromkeys(quickstart_page.ACCURACIES, 0.1234))
    )

    (tmp_path / "run.json").write_text(
        json.dumps({"parameters": 157120, "steps": 2, "engine": "hf"})
    )
    of = quickstart_page.record(tmp_path)
    assert of["curves"] == {
        "reward": [[1, 0.1], [2, 0.2]],
        "accuracy": [[2, 0.5]],
        "mismatch": [[1, 1e-6], [2, 2e-6]],
    }
    assert (
        "157,120 parameters, 2 steps of GRPO, held-out accuracy 12% at the start"
        in quickstart_page.sentence(of)
    )
    assert quickstart_page.picture(of).count("<polyline") == 3
