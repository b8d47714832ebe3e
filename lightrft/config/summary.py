"""Summarise a run in a few lines: algorithm, layout, and samples of a step."""

from lightrft.config.sections import COMMANDS, OF_ZERO, Config, engine_name, needs_reference


def summary(
    config: Config, command: str, world_size: int, ranks_per_node: int | None = None
) -> list[str]:
    """Return the lines that a run logs first: algorithm, KL penalty, layout, engine and the
    arithmetic of the batches.

    With `ranks_per_node` the layout comes with --dp_replicate for models that fit on one node.
    """
    lines = [_algorithm(config), _kl_penalty(config)] if command == "train_ppo" else []
    lines.append(_layout(config, world_size))
    if ranks_per_node and (nodes := nodes_to_replicate(config, world_size, ranks_per_node)):
        lines.append(
            f"parameters are gathered over {nodes} nodes: where the model fits on one of them,"
            f" --dp_replicate {nodes} gathers them within each (`lightrft plan` says whether it"
            " fits)"
        )

    if "engine" in COMMANDS[command]:
        lines.append(_engine(config, world_size))
    if "optim" in COMMANDS[command]:
        lines.append(_batches(config, command))
        lines += _checkpoints(config)

    return lines


def _algorithm(config: Config) -> str:
    algorithm = config.algorithm
    default = " (default; for PPO with a critic: --advantage_estimator ppo)"
    if "advantage_estimator" in algorithm.written:
        default = ""

    return (
        f"algorithm: {algorithm.advantage_estimator}{default}, policy loss {algorithm.policy_loss},"
        f" clip {algorithm.eps_clip_low:g} to {algorithm.eps_clip_high:g},"
        f" {algorithm.loss_agg_mode}"
    )


def _kl_penalty(config: Config) -> str:
    algorithm = config.algorithm
    if not needs_reference(algorithm):
        return "KL penalty: none"
    where = "in the loss" if algorithm.use_kl_loss else "subtracted from the rewards"
    amount = "only measured"
    if algorithm.init_kl_coef:
        amount = f"{algorithm.init_kl_coef:g} x {algorithm.kl_estimator} {where}"
    return f"KL penalty: {amount}"


def _layout(config: Config, world_size: int) -> str:
    strategy = config.strategy
    sequence = max(strategy.sp_size, strategy.cp_size)
    sizes = {
        "dp_replicate": strategy.dp_replicate,
        "sp": sequence,
        "tp": strategy.tp_size,
        "ep": strategy.ep_size,
    }
    cut = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
    zero = f", ZeRO stage {strategy.zero_stage}" if strategy.strategy == "deepspeed" else ""
    if zero and not {"strategy", "fsdp"} & strategy.written:
        zero += "".join(f" (--{name})" for name in sorted(OF_ZERO & strategy.written)[:1])
    world_size -= config.rollout.rollout_ranks
    data = world_size // (sequence * strategy.tp_size)
    return f"layout: {strategy.strategy}{zero} on {world_size} processes, {data} data ranks{cut}"


def nodes_to_replicate(config: Config, world_size: int, ranks_per_node: int) -> int:
    """Return how many nodes FSDP2 shards one copy of the model over, if each could have a copy;
    else 0.
    """
    strategy = config.strategy
    ranks = world_size - config.rollout.rollout_ranks
    parallel = max(strategy.sp_size, strategy.cp_size) * strategy.tp_size
    nodes, rest = divmod(ranks, ranks_per_node)
    possible = (
        strategy.strategy == "fsdp"
        and strategy.dp_replicate == 1
        and not rest
        and ranks_per_node % parallel == 0
        and ranks_per_node % strategy.ep_size == 0
    )

    return nodes if possible and nodes > 1 else 0


def _engine(config: Config, world_size: int) -> str:
    size = config.engine.engine_tp_size
    ranks = config.rollout.rollout_ranks
    where = f", on the last {ranks} processes, which only generate" if ranks else ""
    return (
        f"engine: {engine_name(config.engine)}, {(ranks or world_size) // size} replicas with"
        f" {size} processes each{where}"
    )


def _checkpoints(config: Config) -> list[str]:
    """Return a line for a run that writes no checkpoints, because a crash then costs all steps."""
    if config.train.save_steps > 0 or config.train.save_minutes or config.train.load_checkpoint:
        return []
    return [
        "checkpoints: none unless Ctrl-C or SIGTERM stops the run; --save_steps N writes one after"
        " every N-th step"
    ]


def _batches(config: Config, command: str) -> str:
    train = config.train
    rollout = config.rollout
    end = f"at most {train.max_tokens_per_microbatch} tokens in a micro-batch of one rank"
    if command != "train_ppo":
        return f"step: {train.train_batch_size} rows, {end}"

    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    updates = samples // train.train_batch_size * train.max_epochs
    return (
        f"step: {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples ="
        f" {samples} samples, {updates} optimizer steps of {train.train_batch_size}, {end}"
    )
