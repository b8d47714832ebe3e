"""What the scripts start: stand-ins for torchrun and Slurm catch the command lines.

The real parser reads them.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from lightrft.app.run.prepare import prepare_config
from lightrft.config import flags_without_effect, parse
from runs import prepare, rows_of
from warm import warm_environment

ROOT = Path(__file__).resolve().parents[2]
RUNS = sorted(path.name for path in ROOT.glob("scripts/run_*.sh") if path.stem != "run_pipeline")
TORCHRUN = f"""#!{sys.executable}
import json, sys
with open("{{log}}", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
"""
STAND_INS = {
    "nvidia-smi": "#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo GPU $gpu; done\n",
    "scontrol": "#!/bin/sh\necho node07; sleep 0.1; echo node08\n",
    "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
    'for node in $(seq 0 $((NNODES - 1))); do SLURM_NODEID=$node "$@"; done\n',
}


@pytest.fixture
def cluster(tmp_path):
    """Run a script where torchrun, the GPUs and Slurm are stand-ins.

    Returns what torchrun was asked for, call by call.
    """
    tools = tmp_path / "bin"
    log = tmp_path / "log"
    data = tmp_path / "data"
    tools.mkdir()
    data.mkdir()
    (data / "test.jsonl").touch()

    for name, text in (STAND_INS | {"torchrun": TORCHRUN.format(log=log)}).items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(*command: str, **environment: str) -> list[list[str]]:
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "DATA": str(data),
            "LANG": "C.UTF-8",
        } | environment
        subprocess.run(
            ["bash", *command],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )

        return [json.loads(line) for line in log.read_text().splitlines()]

    return run


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def check(command: list[str], monkeypatch) -> None:
    """Check that the flags after `-m lightrft COMMAND` make a possible run.

    Each of them must have an effect.
    """
    assert option(command, "-m") == "lightrft"
    entrypoint, *flags = command[command.index("-m") + 2 :]
    nodes = int(option(command, "--nnodes")) if "--nnodes" in command else 1
    monkeypatch.setenv("WORLD_SIZE", str(nodes * int(option(command, "--nproc-per-node"))))
    monkeypatch.chdir(ROOT)
    config = prepare_config(entrypoint, parse(flags, entrypoint))
    assert flags_without_effect(config, entrypoint) == []


@pytest.mark.parametrize("script", RUNS)
def test_a_run_on_one_node(cluster, monkeypatch, script):
    (command,) = cluster(f"scripts/{script}", "--seed", "7")
    assert command[:3] == ["--standalone", "--nproc-per-node", "8"] and command[-2:] == [
        "--seed",
        "7",
    ]
    check(command, monkeypatch)


@pytest.mark.parametrize("script", RUNS)
def test_a_run_on_two_nodes_of_slurm(cluster, monkeypatch, script):
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "node[07-08]",
    }
    commands = cluster("deploy/slurm.sbatch", f"scripts/{script}", "--seed", "7", **job)
    assert [option(command, "--node-rank") for command in commands] == ["0", "1"]

    for command in commands:
        assert (
            option(command, "--master-addr") == "node07"
            and option(command, "--master-port") == "23456"
        )
        name = script.removeprefix("run_").removesuffix(".sh")
        assert command[command.index("--load_checkpoint") :][1:] == [
            "--save_path",
            f"runs/{name}_123456",
            "--seed",
            "7",
        ]
        check(command, monkeypatch)


def test_two_nodes_by_hand(cluster):
    (command,) = cluster(
        "scripts/run_grpo_gsm8k.sh", NNODES="2", NODE_RANK="1", MASTER_ADDR="first", NPROC="3"
    )
    assert command[:10] == [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "first",
        "--master-port",
        "29500",
        "--nproc-per-node",
        "3",
    ]


NUMA = {
    "nvidia-smi": "#!/bin/sh\ncase $1 in --list-gpus) echo GPU 0; echo GPU 1 ;;"
    " *) echo 00000000:0A:00.0; echo 00000000:DC:00.0 ;; esac\n",
    "numactl": "#!/bin/sh\n[ $# = 2 ] && [ $2 = true ] && [ $1 != --cpunodebind=3 ]\n",
    "cat": "#!/bin/sh\ncase $1 in"
    " */0000:0a:00.0/numa_node) echo 0 ;; */0000:dc:00.0/numa_node) echo $LAST_GPU ;; esac\n",
}
"""Two GPUs, on the nodes 0 and $LAST_GPU; the job may use no core of node 3."""


@pytest.mark.parametrize(
    ("given", "binds"),
    [
        ({"LAST_GPU": "1"}, ["--numa-binding", "node"]),
        ({"LAST_GPU": "1", "NUMA_BINDING": "exclusive"}, ["--numa-binding", "exclusive"]),
        ({"LAST_GPU": "1", "NUMA_BINDING": "none"}, []),
        ({"LAST_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}, []),
        ({"LAST_GPU": "3"}, []),
        ({"LAST_GPU": "-1"}, []),
    ],
)
def test_ranks_are_bound_to_the_cores_near_their_gpus(cluster, tmp_path, given, binds):
    for name, text in NUMA.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (command,) = cluster("scripts/run_grpo_gsm8k.sh", **given)
    expected = ["--standalone", *binds, "--nproc-per-node", "2"]
    assert command[: len(expected)] == expected

    known = get_args_parser().parse_args([*expected, "script.py"])
    assert known.numa_binding == (binds[1] if binds else None)


FIRST = {"MASTER_ADDR": "first", "NPROC": "3"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            FIRST | {"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4", "SLURM_NODEID": "1"},
            ["--nnodes", "2", "--node-rank", "1"],
        ),
        (
            FIRST | {"NNODES": "4", "JOB_COMPLETION_INDEX": "3"},
            ["--nnodes", "4", "--node-rank", "3"],
        ),
        (
            FIRST | {"NNODES": "2", "NODE_RANK": "1", "PET_NNODES": "4", "PET_NODE_RANK": "3"},
            ["--nnodes", "2", "--node-rank", "1"],
        ),
        (
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
            ["--standalone", "--nproc-per-node", "8"],
        ),
        (
            FIRST | {"NNODES": "2:3"},
            [
                "--nnodes",
                "2:3",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "first:29500",
                "--rdzv-id",
                "first:29500",
                "--max-restarts",
                "3",
                "--nproc-per-node",
                "3",
            ],
        ),
        (
            {
                "PET_NNODES": "1:3",
                "PET_RDZV_ENDPOINT": "there:1",
                "PET_RDZV_ID": "job",
                "PET_MAX_RESTARTS": "9",
            },
            [
                "--nnodes",
                "1:3",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "there:1",
                "--rdzv-id",
                "job",
                "--max-restarts",
                "9",
            ],
        ),
    ],
)
def test_the_place_of_a_node_is_read_from_its_launcher(cluster, given, expected):
    """tests/models/launch/test_nodes.py has the others, where real torchruns meet."""
    (command,) = cluster("scripts/run_grpo_gsm8k.sh", **given)
    assert command[: len(expected)] == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"SLURM_NNODES": "2"},
            "this is one of 2 nodes: MASTER_ADDR is the name of the first node",
        ),
        ({"NNODES": "2", "MASTER_ADDR": "first"}, "NODE_RANK says which of the nodes this is"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is the name of the first node"),
    ],
)
def test_what_two_nodes_need_is_said(cluster, given, says):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster("scripts/run_grpo_gsm8k.sh", **given)
    assert says in failed.value.stderr


def test_a_slurm_job_needs_a_script(cluster):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster("deploy/slurm.sbatch", SLURM_SUBMIT_DIR=str(ROOT))
    assert "which run? sbatch deploy/slurm.sbatch scripts/" in failed.value.stderr


def test_the_slurm_job_asks_for_one_launcher_on_each_node():
    header = re.findall(
        r"^#SBATCH --([\w-]+)=?(.*)$", (ROOT / "deploy/slurm.sbatch").read_text(), re.MULTILINE
    )
    assert (
        dict(header)["ntasks-per-node"] == "1"
        and int(dict(header)["nodes"]) > 1
        and "requeue" in dict(header)
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("deploy/*.sbatch"), ROOT / ".ci" / "run"]
    checked = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.stdout == "" and checked.returncode == 0


@pytest.mark.slow
def test_a_script_really_runs(tmp_path):
    """GSPO with a tiny model, two processes and the hf engine."""
    flags = [flag for flag in prepare(tmp_path) if not flag.startswith(("--fsdp", "--prompt_data"))]
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    small = [
        "--bf16=false",
        "--apply_chat_template=false",
        "--engine_type=hf",
        "--rollout_batch_size=8",
        "--generate_max_len=6",
        "--train_batch_size=32",
        "--n_samples_per_prompt=4",
        "--max_steps=2",
        f"--save_path={tmp_path / 'run'}",
    ]
    environment = warm_environment(DATA=str(tmp_path), NPROC="2", PYTHONPATH=str(ROOT))
    command = ["bash", ROOT / "scripts/run_gspo_gsm8k.sh", *flags, *small]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "model" / "config.json").exists()
