"""The simulator of schedules gives the same figures every time, and shows what each is for."""

from scripts.bench.rollout_schedule import options, simulate

FEW = (
    "--step_ms 10 0.05 0 0 --ranks 4 --steps 8 --every 8 --median 200 --most 3200 --distributions"
    " log_normal"
)


def speedups(flags: str) -> dict[str, float]:
    """Return schedule -> speedup relative to fifo."""
    args = options(f"{FEW} {flags}".split())
    (row,) = simulate(args, args.step_ms)
    return row["speedup"]


def test_tail_rounds_are_faster_where_all_responses_run_at_once():
    found = speedups("--samples 8")
    assert found["fifo"] == 1 and found["known_lengths"] > found["tail_rounds_2.0"] > 1.4
    assert found["longest_first"] > 0.97, "it changes little, and costs nothing"


def test_divided_and_predicted_groups_are_faster_where_responses_wait():
    """Prompts differ in length, and 64 responses wait for 16 slots of each rank."""
    flags = "--samples 16 --slots 16 --correlation 0.7 --visits 0"
    found = speedups(flags)
    assert (
        found["longest_first"] > 1.05
        and found["longest_first"] > found["longest_first_blind"] > found["longest_first_whole"]
    )
    assert found == speedups(flags)
