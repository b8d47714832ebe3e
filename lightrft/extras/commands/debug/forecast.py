"""Forecast the reward of a run, and the hours and the cost to a target, with intervals of 90 %.

lightrft forecast runs/mine --target 0.9 --price 2.5
"""

from rich.console import Console

from lightrft.app.cli import command_parser
from lightrft.app.observe.curves import read_history
from lightrft.app.run.logs import set_up_logging
from lightrft.config.values import read_object
from lightrft.extras.tools.forecast import Forecast, Interval

RECENT = 10
"""Number of last steps whose seconds are averaged."""


def main(argv: list[str] | None = None) -> None:
    commands = command_parser("forecast", __doc__)
    options = commands.parse_args(argv)
    set_up_logging()

    history = read_history(options.folder / "metrics.jsonl")
    rewards = [value for _, value in history.get("rollout/reward", ()) if value is not None]
    largest = [value for _, value in history.get("rollout/reward_max", ()) if value is not None]
    described = read_object(options.folder / "run.json")
    until = options.steps or described.get("total_steps") or 2 * len(rewards)
    try:
        forecast = Forecast(rewards, most=max(largest, default=float("inf")))
    except ValueError as error:
        commands.error(f"{options.folder}: {error}")
    if until <= forecast.num_steps:
        commands.error(
            f"{options.folder} has {forecast.num_steps} steps already; choose more --steps"
        )

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"rollout/reward after step {until}: {_text(forecast.at(until))}")
    if options.target is None:
        return

    probability, when = forecast.reaches(options.target, until)
    console.print(
        f"{options.target:g} is reached by step {until} with a probability of {probability:.0%}"
    )
    if probability == 0:
        return

    seconds = [value for _, value in history.get("time/step", ()) if value is not None][-RECENT:]
    hours = sum(seconds) / max(len(seconds), 1) / 3600
    left = Interval(*(step - forecast.num_steps for step in (when.low, when.middle, when.high)))
    console.print(f"if so, in {_text(left)} steps, {_text(_times(left, hours))} hours")
    if options.price:
        cost = hours * options.price * described.get("world_size", 1)
        console.print(f"for {_text(_times(left, cost))} at {options.price:g} an hour and device")


def _times(interval: Interval, factor: float) -> Interval:
    return Interval(interval.low * factor, interval.middle * factor, interval.high * factor)


def _text(interval: Interval) -> str:
    return f"{interval.middle:.3g} ({interval.low:.3g} to {interval.high:.3g})"
