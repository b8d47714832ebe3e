"""One training is handed on from ranks to ranks and from strategy to strategy.

The result is that of one process without a break.
"""

import pytest
import torch

from lightrft.strategy import get_strategy
from ranks import run_ranks
from strategy.training import distance, load, my_rows, rows, share_of_loss, snapshot, tokens_learned

RELAYS = {
    "fewer ranks": [(4, {"fsdp": True}), (2, {"fsdp": True}), (1, {"fsdp": True})],
    "more ranks": [
        (1, {"fsdp": True}),
        (2, {"fsdp": True, "fsdp_cpu_offload": True}),
        (4, {"fsdp": True, "dp_replicate": 2}),
    ],
    "strategies": [
        (2, {"fsdp": True}),
        (2, {"zero_stage": 3, "adam_offload": True, "param_offload": True}),
        (1, {"zero_stage": 2}),
        (2, {"zero_stage": 0}),
        (2, {"fsdp": True}),
    ],
    "ZeRO": [
        (4, {"zero_stage": 3}),
        (2, {"zero_stage": 1}),
        (1, {"zero_stage": 3}),
        (2, {"zero_stage": 2}),
    ],
    "bfloat16": [
        (2, {"fsdp": True, "bf16": True}),
        (2, {"zero_stage": 2, "bf16": True}),
        (1, {"zero_stage": 3, "bf16": True}),
        (2, {"fsdp": True, "bf16": True}),
    ],
}


def leg(folder: str, root, args: dict, steps: range):
    made = get_strategy({**args, "seed": 1, "max_norm": 1.0})
    made.setup_distributed()
    model = load(folder)
    optimizer = made.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    scheduler = made.create_scheduler(optimizer, "cosine", 2, 12)
    made.prepare((model, optimizer, scheduler))
    made.load_ckpt(model, root)
    begun_with = snapshot(made, model)

    numbers = []
    for step in steps:
        loss = share_of_loss(model, my_rows(made, step), tokens_learned(rows(step)))
        made.backward(loss, model, optimizer)
        norm = made.optimizer_step(optimizer, model, scheduler)
        numbers.append((made.all_reduce(loss.item(), "sum"), norm.item(), scheduler.last_epoch))

    made.save_ckpt(model, root, f"step{steps.stop}")
    return numbers, begun_with, snapshot(made, model)


@pytest.mark.slow
@pytest.mark.parametrize("relay", RELAYS)
def test_a_relay_is_one_run(folder, tmp_path, relay):
    legs = RELAYS[relay]
    bf16 = relay == "bfloat16"
    alone = {"fsdp": True, "bf16": bf16}
    expected, _, final = run_ranks(1, leg, folder, tmp_path / "one", alone, range(2 * len(legs)))[0]
    numbers = []

    before = None
    for index, (world_size, args) in enumerate(legs):
        results = run_ranks(
            world_size, leg, folder, tmp_path / "relay", args, range(2 * index, 2 * index + 2)
        )
        assert all(result[0] == results[0][0] for result in results)
        if before is not None:
            assert all(torch.equal(results[0][1][name], before[name]) for name in before)
        numbers += results[0][0]
        before = results[0][2]

    torch.testing.assert_close(
        torch.tensor(numbers), torch.tensor(expected), rtol=2e-2 if bf16 else 1e-5, atol=0
    )
    assert distance(before, final) < (2e-2 if bf16 else 1e-5)
