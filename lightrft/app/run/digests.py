"""Write a digest of each phase of each step, so that two runs can be compared afterwards.

A line of digests.jsonl has 16 bytes, in hexadecimal, for each phase. `lightrft bisect` finds the
first one where two runs differ:

    {"step": 3, "prompts": "...", "samples": "...", "logprobs": "...", "rewards": "...",
     "outputs": "...", "advantages": "...", "plan": "...", "loss": "...",
     "gradient": {"embed_tokens": "...", "layers.0": "..."}, "weights": {...},
     "updates": ["...", "..."]}

`updates` has 4 bytes each for loss, gradient and weights of an optimizer step, because a step may
have several of these. Digests of sequences do not depend on the number of ranks, or on which rank
has a sequence. The plan, the gradient and the weights of a rank do. Line 0 has the weights that a
run begins with.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.roles.role import DistributedRole
from lightrft.app.observe.sinks import Writer, encode_row, truncate_rows
from lightrft.core.step import StepRecord
from lightrft.models.parallel.mesh import Mesh
from lightrft.strategy.backends.optim import BitSums

FILE = "digests.jsonl"
OF_SEQUENCES = ("prompts", "samples", "logprobs", "rewards", "outputs", "advantages")
PHASES = (*OF_SEQUENCES, "plan", "loss", "gradient", "weights")
"""Phases of a step, in their order."""
MOST_BLOCKS = 10
"""Blocks of all models with a digest each; consecutive layers share one in a deep model."""
MOST_UPDATES = 16
"""Optimizer steps of one step with a digest of their own: the first ones."""
MODULO = 2**128
LAYER = re.compile(r"\.(\d+)\.")
NOT_OUTPUTS = tuple(
    "input_ids loss_mask engine_logprobs advantages reward_advantages learned".split()
)


class Digests:
    """The digests of a run. Nothing waits for the device before the end of a step."""

    def __init__(
        self, roles: Mapping[str, DistributedRole], mesh: Mesh, folder: Path, writer: Writer
    ):
        """Follow the optimizers of `roles`, by name. Rank 0 writes to the folder."""
        self.mesh = mesh
        self.path = folder / FILE
        self.writer = writer
        self.begins = True
        """True until the first line of a run from the beginning is written."""
        learning = {name: role for name, role in roles.items() if role.optimizer is not None}
        most = MOST_BLOCKS // max(len(learning), 1)
        self.models: list[BitSums] = []

        for name, role in learning.items():
            named = dict(role.module.named_parameters())
            prefix = "" if name == "actor" else f"{name}."
            found = blocks_of([*named], most).items()
            blocks = {named[parameter]: prefix + block for parameter, block in found}
            # ZeRO steps partitions in place of parameters.
            others = f"{prefix}partitions"
            self.models.append(BitSums(role.optimizer, role.strategy.device, blocks, others))

    def start(self, resume_step: int | None) -> None:
        """Drop the lines after the checkpoint that the run goes on from."""
        self.begins = resume_step is None
        if self.mesh.world.rank:
            return
        if self.begins:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            truncate_rows(self.path, resume_step)

    def write(self, step: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Write the digests of a step on rank 0; `ranks` has what of_rank() returned on each."""
        if self.mesh.world.rank:
            return

        rows = [row_of(step, ranks)]
        if self.begins and ranks[0]["before"]:
            rows.insert(0, {"step": step - 1, "weights": _joined(ranks, "before")})
        self.begins = False
        self.writer.submit(partial(_append, self.path, rows))

    def of_rank(self, record: StepRecord) -> dict[str, Any]:
        """Return the digests of this rank's share of a step."""
        # Ranks of one replica have the same sequences, which count once.
        leads = self.mesh.model_parallel.rank == 0
        batch = record.batch
        plan = repr([record.minibatches, batch.lengths.tolist()]).encode()
        local = {
            "sequences": _sequences(record) if leads else {},
            "plan": _digest(plan, _bytes(batch.input_ids)),
            "losses": [*map(_digest, _numbers(record.losses))],
        }
        for kind in ("before", "gradient", "weights"):
            blocks: dict[str, list[bytes]] = {}
            updates: dict[tuple[int, int], list[bytes]] = {}
            for index, model in enumerate(self.models):
                sums = model.take(kind)
                numbers = _numbers([total for *_, total in sums])
                for (update, block, _), number in zip(sums, numbers, strict=True):
                    blocks.setdefault(block, []).append(number)
                    updates.setdefault((index, update), []).append(number)

            local[kind] = {block: _digest(*digests) for block, digests in blocks.items()}
            local[f"{kind}_updates"] = [_digest(*digests) for digests in updates.values()]

        return local


def blocks_of(names: Sequence[str], most: int) -> dict[str, str]:
    """Return for each parameter the block of the model that it belongs to: at most `most` blocks.

    model.layers.3.mlp.up_proj.weight belongs to layers.3, or to layers.2-3 if there are more layers
    than blocks, and model.embed_tokens.weight to embed_tokens.
    """
    found: dict[str, tuple[str, int | None]] = {}
    for name in names:
        layer = LAYER.search(name)
        if layer:
            found[name] = name[: layer.start()].rpartition(".")[2], int(layer[1])
        else:
            found[name] = (name.split(".")[-2:-1] or [name])[0], None

    layers = {each for each in found.values() if each[1] is not None}
    others = len(set(found.values()) - layers)
    room = max(most - others, 1)
    together = -(-len(layers) // room)
    ends = {stack: max(number for each, number in layers if each == stack) for stack, _ in layers}

    blocks = {}
    for name, (stack, number) in found.items():
        if number is None:
            blocks[name] = stack
            continue
        first = number // together * together
        last = min(first + together - 1, ends[stack])
        blocks[name] = f"{stack}.{first}" + (f"-{last}" if last > first else "")
    return blocks


def _sequences(record: StepRecord) -> dict[str, int]:
    """Return the sum of digests over sequences: in any order, and on any number of ranks."""
    sums = dict.fromkeys(OF_SEQUENCES, 0)
    seen = set()

    def add(phase: str, *content: bytes) -> None:
        sums[phase] += int.from_bytes(_digest(*content))

    for sample in record.samples:
        group = str(sample.group).encode()
        if sample.group not in seen:
            seen.add(sample.group)
            add("prompts", group, array("i", sample.prompt.token_ids).tobytes())
        for row in sample.rows:
            tokens = array("i", row.token_ids).tobytes()
            add("samples", group, tokens)
            add("logprobs", group, tokens, array("d", row.logprobs).tobytes())
        reward = [sample.reward, sample.reward_components, sample.token_rewards, sample.masked]
        add("rewards", group, tokens, repr(reward).encode())

    batch = record.batch
    columns = batch.columns("token")
    named = [name for name in columns if name not in NOT_OUTPUTS]
    kinds = {
        "advantages" if record.samples else "prompts": ["loss_mask", "advantages"],
        "outputs": named,
    }
    lengths = batch.lengths.tolist()
    pieces = {name: _split(values, lengths) for name, values in columns.items()}
    for row, tokens in enumerate(pieces["input_ids"]):
        for phase, names in kinds.items():
            add(phase, tokens, *[pieces[name][row] for name in names if name in pieces])

    return sums


def row_of(step: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the digests of all ranks, in the order of the ranks."""
    row: dict[str, Any] = {"step": step}
    for phase in OF_SEQUENCES:
        # Supervised training has no samples, so it lacks some phases.
        if total := sum(rank["sequences"].get(phase, 0) for rank in ranks):
            row[phase] = f"{total % MODULO:032x}"

    row["plan"] = _digest(*(rank["plan"] for rank in ranks)).hex()
    # The loss is a sum over all ranks already.
    losses = ranks[0]["losses"]
    row["loss"] = _digest(*losses).hex()
    row |= {kind: _joined(ranks, kind) for kind in ("gradient", "weights")}

    of_updates = [[loss[:4].hex() for loss in losses]]
    for kind in ("gradient_updates", "weights_updates"):
        in_turn = zip_longest(*(rank[kind] for rank in ranks), fillvalue=b"")
        of_updates.append([_digest(*digests)[:4].hex() for digests in in_turn])
    row["updates"] = ["".join(each) for each in zip(*of_updates, strict=False)][:MOST_UPDATES]
    return row


def _joined(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[str, str]:
    blocks = dict.fromkeys(block for rank in ranks for block in rank[name])
    return {
        block: _digest(*(rank[name].get(block, b"") for rank in ranks)).hex() for block in blocks
    }


def _digest(*content: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for piece in content:
        hasher.update(len(piece).to_bytes(8))
        hasher.update(piece)
    return hasher.digest()


def _numbers(values: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of scalars on the device, in one transfer."""
    if not values:
        return []
    together = torch.stack([value.detach().to(values[0].device) for value in values])
    return _split(together, [1] * len(values))


def _split(values: Tensor, lengths: Sequence[int]) -> list[bytes]:
    """Return the bytes of consecutive pieces with so many elements of the first dimension."""
    content = _bytes(values)
    size = len(content) // max(len(values), 1)
    ends = accumulate(lengths, initial=0)
    return [content[start * size : end * size] for start, end in pairwise(ends)]


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(map(encode_row, rows)))


def read_digests(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the digests of a run by step. Raises FileNotFoundError for a run without any."""
    lines = (folder / FILE).read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row for row in rows}
