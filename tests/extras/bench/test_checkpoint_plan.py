"""Why: at a thousand ranks everybody waits for the plan of a checkpoint, so it is made once."""

from scripts.bench.checkpoint_plan import main


def test_the_next_plan_costs_nothing():
    few, many = main(["--ranks", "4", "8", "--model", "Qwen/Qwen2.5-0.5B"])
    assert 3 * 290 < few["items"] < many["items"] <= 2 * few["items"]
    assert many["next_s"] < 0.1 * many["first_s"]
