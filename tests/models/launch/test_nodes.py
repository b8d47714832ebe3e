"""Nodes on this machine: how they meet, and go on without one.

Each is a `bash scripts/launch.sh` with a torchrun of its own.

    # lose a node in each of these phases
    LOSE_IN=generate,reward,experience,train,checkpoint python -m pytest tests/models/launch/test_nodes.py
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.trainer import sabotage
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.run import WORK
from lightrft.config import Config, ConfigError
from runs import PPO, prepare, repeatable, rows_of, train
from warm import warm_programs, warm_python

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = """#!{python} -IS
import os, sys
launcher, arguments = {launcher!r}, sys.argv[1:]
module = arguments.index("-m")
arguments[module : module + 3] = [os.environ["PROGRAM"]]
os.execv(launcher[0], [*launcher, *arguments])
"""
"""The real torchrun, which starts PROGRAM instead of a command of lightrft."""
OF_A_LAUNCHER = re.compile(
    "(PET|SLURM|SKYPILOT|TORCHELASTIC|MASTER|JOB)_|(NNODES|NODE_RANK|NPROC|RANK|WORLD_SIZE)$"
)
PROBE = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from lightrft.models.launch.rendezvous import join_process_group
processes = join_process_group(torch.device("cpu"), timedelta(seconds=60), timedelta(seconds=60))
ranks = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(ranks)
found = [dist.get_rank(), dist.get_world_size(), int(ranks), os.environ.get("GLOO_SOCKET_IFNAME", "")]
open(os.path.join(sys.argv[1], os.environ["NAME"]), "w").write(json.dumps(found))
dist.destroy_process_group()
"""


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return str(listening.getsockname()[1])


def start_nodes(
    folder: Path,
    launcher: list[str],
    program: Path | str,
    nodes: dict[str, dict[str, str]],
    *flags: str,
) -> dict[str, subprocess.Popen]:
    """Start launch.sh once for each node, with that node's variables only.

    The output goes to `folder`/NODE.log.
    """
    (folder / "bin").mkdir()
    (folder / "bin" / "torchrun").write_text(
        TORCHRUN.format(python=sys.executable, launcher=launcher)
    )
    (folder / "bin" / "torchrun").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not OF_A_LAUNCHER.match(name)}
    variables_of_test = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROGRAM": str(program),
        "NPROC": "1",
    }

    return {
        name: subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "launch.sh"), "train_ppo", *flags],
            env=clean | variables_of_test | {"NAME": name} | variables,
            cwd=ROOT,
            stdout=open(folder / f"{name}.log", "w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for name, variables in nodes.items()
    }


def stop(nodes: dict[str, subprocess.Popen]) -> None:
    for node in nodes.values():
        if node.poll() is None:
            node.send_signal(signal.SIGKILL)  # the guards end the ranks
            node.wait()


def default_interface() -> tuple[str, str]:
    """(name, address) of the interface of the default route, from the kernel's table.

    Without a default route it is the loopback interface.
    """
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    name = next((route[0] for route in routes if route[1] == "00000000"), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            probe.connect(("192.0.2.1", 1))
            return name, probe.getsockname()[0]
    return "", "127.0.0.1"


@pytest.mark.slow
def test_nodes_that_know_their_place_from_different_launchers_meet(tmp_path):
    """On the first node the host name is a loopback address, as on Debian."""
    (tmp_path / "probe.py").write_text(PROBE)
    interface, address = default_interface()
    port = free_port()
    sky = {
        "SKYPILOT_NODE_IPS": f"{address}\n192.0.2.1\n192.0.2.2\n192.0.2.3",
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "MASTER_PORT": port,
    }
    nodes = start_nodes(
        tmp_path,
        [f"{warm_programs()}/torchrun"],
        tmp_path / "probe.py",
        {
            "own": {
                "NNODES": "4",
                "NODE_RANK": "0",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            },
            "kubeflow": {
                "PET_NNODES": "4",
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": address,
                "PET_MASTER_PORT": port,
            },
            "sky": sky,
            "pytorchjob": {
                "WORLD_SIZE": "4",
                "RANK": "3",
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            },
        },
        str(tmp_path),
    )

    with ExitStack() as ending:
        ending.callback(stop, nodes)
        for name, node in nodes.items():
            assert node.wait(120) == 0, (tmp_path / f"{name}.log").read_text()

    found = {name: json.loads((tmp_path / name).read_text()) for name in nodes}
    assert found == {name: [rank, 4, 15, interface] for rank, name in enumerate(nodes)}


# -- a process without a rank

ALONE = [
    ({"PET_NNODES": "2"}, "PET_NNODES=2"),
    ({"NNODES": "2:3"}, "NNODES=2:3"),
    ({"SKYPILOT_NUM_NODES": "4"}, "SKYPILOT_NUM_NODES=4"),
    ({"SLURM_NNODES": "2", "SLURM_NTASKS": "16"}, "SLURM_NNODES=2, SLURM_NTASKS=16"),
    ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1"),
    ({"PET_NNODES": "1", "JOB_COMPLETION_INDEX": "0", "SLURM_NNODES": "1"}, ""),
    ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "1"}, ""),
]


@pytest.mark.parametrize(("variables", "says"), ALONE)
def test_one_of_several_without_a_rank_is_an_error_of_every_command(monkeypatch, variables, says):
    for name in filter(OF_A_LAUNCHER.match, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for command in WORK:
        # without a rank's problem, those of an empty configuration
        with pytest.raises(ConfigError) as error:
            prepare_config(command, Config())
        said = str(error.value)
        assert (
            ("would run alone" in said) == bool(says)
            and says in said
            and ("launch.sh" in said) == bool(says)
        )


# -- a node that is lost

ELASTIC = [
    *PPO,
    "--rollout_batch_size=12",
    "--n_samples_per_prompt=2",
    "--train_batch_size=24",
    "--max_steps=6",
    "--save_steps=2",
]
TIMEOUTS = "last_call_timeout=10,keep_alive_interval=3"
"""Nodes of a busy machine start seconds apart, and a node whose thread is late by three intervals
counts as lost."""
LOST_IN = 4
"""Step in which the third node is lost; the newest checkpoint is that of step 2."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", os.environ.get("LOSE_IN", "checkpoint").split(","))
def test_two_nodes_go_on_without_the_third(tmp_path, phase):
    """The history is what two ranks have that resume by hand from the same checkpoint.

    It agrees to the last digit.
    """
    flags = [*prepare(tmp_path), *ELASTIC]
    run = tmp_path / "run"
    times = LOST_IN // 2 if phase == "checkpoint" else LOST_IN
    every = {
        "NNODES": "2:3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "PET_LOCAL_ADDR": "127.0.0.1",
    }
    member = every | {"PET_RDZV_CONF": f"{TIMEOUTS},is_host=0", "SABOTAGE": "none:0:none"}
    nodes = start_nodes(
        tmp_path,
        [f"{warm_programs()}/torchrun"],
        sabotage.__file__,
        {
            "first": member | {"PET_RDZV_CONF": f"{TIMEOUTS},is_host=1"},
            "second": member,
            "lost": member | {"SABOTAGE": f"{phase}:*:lose:{times}"},
        },
        *flags,
        f"--save_path={run}",
    )

    with ExitStack() as ending:
        ending.callback(stop, nodes)
        codes = [node.wait(240) for node in nodes.values()]

    logs = [(tmp_path / f"{name}.log").read_text() for name in nodes]
    assert codes == [0, 0, -signal.SIGKILL], "\n".join(logs)
    assert all(
        re.search(rf"rank \d \(pid \d+ on .*in phase {phase}: it was killed", log)
        for log in logs[:2]
    )
    assert any(
        "torchrun has started this run again" in log and "resuming after step 2 from" in log
        for log in logs
    )
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]

    by_hand = Path(
        shutil.copytree(
            run,
            tmp_path / "by_hand",
            ignore=shutil.ignore_patterns("latest", "step4", "step6", "model"),
        )
    )
    (by_hand / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    expected = train("train_ppo", 2, [*flags, "--load_checkpoint"], by_hand)
    assert repeatable(rows) == repeatable(expected) and len(expected) == 6


MEETING_POINT = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serving", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_first_node_may_be_lost_if_the_meeting_point_is_elsewhere(tmp_path):
    """Rank 0 and its launcher are killed twice, in `generate` and in `train`.

    No sample is lost or learned twice.
    """
    flags = [*prepare(tmp_path), *ELASTIC]
    run = tmp_path / "run"
    rollouts = tmp_path / "rollouts"
    port = free_port()
    serving = subprocess.Popen(
        [warm_python(), "-c", MEETING_POINT, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    every = {
        "NNODES": "2:4",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_RDZV_CONF": TIMEOUTS,
        "SABOTAGE": "4@generate:0:lose:4,3@train:0:lose:4",
    }

    with ExitStack() as ending:
        ending.callback(serving.kill)
        assert serving.stdout.readline() == b"serving\n"
        nodes = start_nodes(
            tmp_path,
            [f"{warm_programs()}/torchrun"],
            sabotage.__file__,
            dict.fromkeys("abcd", every),
            *flags,
            f"--save_path={run}",
            f"--dump_rollouts={rollouts}",
        )
        ending.callback(stop, nodes)
        codes = sorted(node.wait(400) for node in nodes.values())

    logs = "\n".join((tmp_path / f"{name}.log").read_text() for name in nodes)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0], logs
    assert all(
        re.search(rf"rank 0 \(pid \d+ on .*in phase {phase}: it was killed", logs)
        for phase in ("generate", "train")
    )
    assert "resuming after step 2 from" in logs and "resuming after step 4 from" in logs
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4, 5, 6]
    learned = {step: learned_prompts(rollouts / f"step_{step:06d}") for step in range(1, 7)}
    assert all(
        sorted(learned[step] + learned[step + 1]) == sorted([*range(24)] * 2) for step in (1, 3, 5)
    )


def learned_prompts(folder: Path) -> list[int]:
    """Return the prompt of each sample of a step.

    Read the files of the fewest ranks, because they did the step last.
    """
    files = sorted(folder.iterdir(), key=lambda file: int(file.stem.rpartition("_")[2]))
    size = files[0].stem.rpartition("_")[2]
    lines = [
        json.loads(line)
        for file in files
        if file.stem.endswith(f"_of_{size}")
        for line in file.read_text().splitlines()
    ]
    return [line["prompt"]["index"] for line in lines if "prompt" in line]
