"""Measure what vLLM's bookkeeping of chosen experts takes in a step (--router_replay).

    python scripts/bench/router_records.py --sequences 256 --steps 200 --repeats 3

The ranks of an engine keep the records of --sequences that sample one token in each step, and then
sum a small tensor, as the layers of the next step do. Once every rank keeps the records, as in
lightrft, and once only the first one does, while the others wait for it in the sum. The last line
is a JSON object: milliseconds of a step in both ways, and without records. There is no model; a
step on an accelerator overlaps with the records of the step before.
"""

import argparse
import json
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.aux_output_connector.connector import (
    AuxOutputConnectorMetadata,
    PackedBlockHashes,
)
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObjectStore
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import in_turn, parser_of, results_of_ranks

FLAGS = {
    "--sequences": 256,
    "--steps": 200,
    "--layers": 48,
    "--experts": 8,
    "--ranks": 2,
    "--repeats": 3,
}
BLOCK = 16
HASH_BYTES = 32
WAYS = {"every_rank": "all", "first_rank": "first", "none": ""}


def connector(sequences: int, shape: tuple[int, int]) -> AuxOutputWorkerConnector:
    """Return what keeps the records of a rank, without the model that would choose experts."""
    made = AuxOutputWorkerConnector.__new__(AuxOutputWorkerConnector)
    chosen = torch.randint(128, (sequences, *shape), dtype=torch.uint8)
    size = BLOCK * shape[0] * shape[1]
    made._capturer = SimpleNamespace(snapshot_routing_data=lambda rows: chosen[:rows])
    made._requests, made._pending_outputs = {}, []
    made._generation, made._step_metadata, made._lock = 0, None, Lock()
    made._max_concurrent_batches = 2
    made._store = BackgroundBlockObjectStore(
        BlockObjectStore(max_bytes=4096 * size, object_nbytes=size),
        max_pending_batches=2 * sequences,
    )
    made._buffer = RoutedExpertsBuffer(np.dtype("uint8"), shape, BLOCK, sequences, sequences, 2)
    return made


def step(made: AuxOutputWorkerConnector, names: list[str], position: int) -> None:
    """Keep the record of one token of each sequence, at this position."""
    hashes = {}
    if (position + 1) % BLOCK == 0:
        hashes = {name: PackedBlockHashes(os.urandom(HASH_BYTES), HASH_BYTES) for name in names}
    requests = dict.fromkeys(names, position)
    made.begin_step(AuxOutputConnectorMetadata(0, requests, hashes, ()))
    count = len(names)
    batch = SimpleNamespace(
        req_ids=names,
        query_start_loc_np=np.arange(count + 1),
        num_computed_tokens_np=np.full(count, position),
    )
    pending = made.prepare_output(batch)
    pending.enqueue_cpu_copy(np.ones(count, dtype=int), np.zeros(count, dtype=int))
    assert len(pending.process_output()) == count


def rank(number: int, store: str, results: Connection, way: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=args.ranks)
    made = connector(args.sequences, (args.layers, args.experts))
    names = [f"{index}/0-{index}" for index in range(args.sequences)]
    value = torch.zeros(16)
    keeps = way == "all" or (way == "first" and number == 0)

    for position in range(args.steps + BLOCK):
        if position == BLOCK:
            begin = time.perf_counter()
        if keeps:
            step(made, names, position)
        dist.all_reduce(value)

    results.send(1e3 * (time.perf_counter() - begin) / args.steps)
    made.close()
    dist.barrier()


def main(argv: list[str] | None = None) -> None:
    args = parser_of(__doc__, FLAGS).parse_args(argv)
    ways = {
        name: lambda way=way: max(results_of_ranks(args.ranks, rank, way, args))
        for name, way in WAYS.items()
    }
    found = in_turn(ways, args.repeats)
    print(json.dumps({name: statistics.median(times) for name, times in found.items()}))


if __name__ == "__main__":
    main()
