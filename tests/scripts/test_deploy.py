"""The images and the jobs of clusters cannot be built or started here.

So their structure is checked, and what they use of the project.

The schemas have the fields that the projects document: Kubeflow Trainer 2
(trainer.kubeflow.org/v1alpha1), JobSet (jobset.x-k8s.io/v1alpha2), Kubernetes (batch/v1 Job and
Pod), and SkyPilot's task YAML. Any other field is an error.
"""

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from lightrft.app.run.prepare import prepare_config
from lightrft.config import flags_without_effect, parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}


def fields(*required: str, **properties) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: dict) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


RESOURCES = fields(
    "limits", limits={"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
)
VOLUME = fields(
    "name",
    name=NAME,
    persistentVolumeClaim=fields("claimName", claimName=NAME),
    emptyDir=fields(medium={"enum": ["Memory", ""]}, sizeLimit=TEXT),
)
CONTAINER = fields(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    command=listed(TEXT),
    args=listed(TEXT),
    resources=RESOURCES,
    env=listed(fields("name", name=TEXT, value=TEXT)),
    volumeMounts=listed(fields("name", "mountPath", name=NAME, mountPath=TEXT)),
)
POD = fields(
    "containers",
    restartPolicy={"enum": ["Never", "OnFailure"]},
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
)
JOB = fields(
    "template",
    completionMode={"const": "Indexed"},
    parallelism=COUNT,
    completions=COUNT,
    backoffLimit={"type": "integer", "minimum": 0},
    template=fields("spec", spec=POD),
)
METADATA = fields(name=NAME, labels={"type": "object", "additionalProperties": TEXT})
REPLICATED = fields(
    "name",
    "template",
    name=NAME,
    replicas=COUNT,
    template=fields("spec", metadata=METADATA, spec=JOB),
)
JOBSET = fields(
    "replicatedJobs",
    failurePolicy=fields(maxRestarts={"type": "integer", "minimum": 0}),
    replicatedJobs=listed(REPLICATED),
)


def kubernetes(version: str, kind: str, spec: dict) -> dict:
    return fields(
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


TRAINER = "trainer.kubeflow.org/v1alpha1"
SCHEMAS = {
    "TrainingRuntime": kubernetes(
        TRAINER,
        "TrainingRuntime",
        fields(
            "template",
            mlPolicy=fields(numNodes=COUNT, torch=fields()),
            template=fields("spec", spec=JOBSET),
        ),
    ),
    "TrainJob": kubernetes(
        TRAINER,
        "TrainJob",
        fields(
            "runtimeRef",
            runtimeRef=fields(
                "name",
                name=NAME,
                kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
                apiGroup={"const": "trainer.kubeflow.org"},
            ),
            trainer=fields(
                image=TEXT,
                numNodes=COUNT,
                command=listed(TEXT),
                args=listed(TEXT),
                resourcesPerNode=RESOURCES,
            ),
        ),
    ),
    "JobSet": kubernetes("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET),
    "task": fields(
        name=NAME,
        num_nodes=COUNT,
        workdir=TEXT,
        setup=TEXT,
        run=TEXT,
        volumes={"type": "object", "additionalProperties": TEXT},
        resources=fields(
            infra=TEXT,
            accelerators={"type": "string", "pattern": r"^\w+:\d+$"},
            job_recovery=fields(max_restarts_on_errors={"type": "integer", "minimum": 0}),
        ),
    ),
}


def documents() -> dict[str, dict]:
    """Return kind -> content of each document of deploy/; SkyPilot's have no kind."""
    found = [
        document
        for file in sorted(ROOT.glob("deploy/*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
    ]
    return {document.get("kind", "task"): document for document in found}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_job_has_documented_fields(kind):
    jsonschema.validate(documents()[kind], SCHEMAS[kind])


def test_every_file_is_checked():
    assert documents().keys() == SCHEMAS.keys()


def commands() -> list[list[str]]:
    found = documents()
    trainer = found["TrainJob"]["spec"]["trainer"]
    container = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]["containers"][0]
    task = shlex.split(found["task"]["run"].splitlines()[-1])
    return [trainer["command"] + trainer["args"], container["command"], task]


@pytest.mark.parametrize("command", commands(), ids=["trainjob", "jobset", "skypilot"])
def test_what_a_job_starts_is_a_script_whose_flags_exist(command, monkeypatch):
    """The parser accepts the run, it resumes, and its folder is on the volume of all nodes."""
    assert command[0] == "bash" and (ROOT / command[1]).is_file()
    script = (ROOT / command[1]).read_text()
    configured = re.findall(r"configs/[\w.-]+\.yaml", script)
    assert len(configured) == 1
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "16")
    flags = [
        "--config",
        configured[0],
        "--prompt_data",
        "train.jsonl",
        "--eval_data",
        "test.jsonl",
        *command[2:],
    ]
    config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    assert flags_without_effect(config, "train_ppo") == []
    assert config.train.load_checkpoint and config.train.save_path.startswith("/runs/")


def test_nodes_agree():
    """The first pod of the JobSet has the name that the others look for.

    Every volume that is mounted is defined.
    """
    found = documents()
    jobset = found["JobSet"]
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    variables = {
        entry["name"]: entry["value"]
        for entry in template["template"]["spec"]["containers"][0]["env"]
    }
    name = jobset["metadata"]["name"]
    assert variables == {
        "NNODES": str(template["completions"]),
        "MASTER_ADDR": f"{name}-{job['name']}-0-0.{name}",
    }

    assert (
        template["parallelism"] == template["completions"]
        and template["completionMode"] == "Indexed"
    )
    runtime = found["TrainingRuntime"]
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]

    for one in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        pod = one["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} >= {"runs"}


# -- images

INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the (instruction, arguments) of a Dockerfile, with lines joined at backslashes."""
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE).replace(
        "\\\n", " "
    )
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_copies_and_runs_what_exists(name):
    lines = instructions(name)
    kinds = [kind for kind, _ in lines]
    assert (
        set(kinds) <= INSTRUCTIONS
        and kinds.count("FROM") == 1
        and set(kinds[: kinds.index("FROM")]) <= {"ARG"}
    )
    copied = [source for kind, rest in lines if kind == "COPY" for source in rest.split()[:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)

    assert all(
        len(rest.split()) == 2 or rest.split()[-1].endswith("/")
        for kind, rest in lines
        if kind == "COPY"
    )
    for script in re.findall(r"scripts/[\w./]+", (ROOT / "docker" / name).read_text()):
        assert (ROOT / script).is_file() and "scripts" in copied
    started = [json.loads(rest) for kind, rest in lines if kind == "CMD"]
    assert (
        started == [["lightrft", "--help"]]
        and "lightrft = lightrft.__main__:main" in (ROOT / "setup.py").read_text()
    )
    assert {"lightrft", "setup.py", "README.md", "scripts", "configs"} <= set(copied), (
        "setup.py reads README.md"
    )


def test_the_image_for_gpus_installs_the_pinned_packages_and_nothing_else():
    arguments = dict(
        rest.split("=", 1) for kind, rest in instructions("Dockerfile") if kind == "ARG"
    )
    used = set(re.findall(r"\$\{(\w+)\}", (ROOT / "docker" / "Dockerfile").read_text()))
    assert used == set(arguments)
    installs = [
        rest.split("install", 1)[1].split()
        for kind, rest in instructions("Dockerfile")
        if kind == "RUN" and rest.startswith("pip")
    ]
    assert installs == [
        ["--no-cache-dir", "--no-deps", "-r", "requirements/gpu.txt"],
        ["--no-cache-dir", "--no-deps", "."],
    ]


def test_the_image_for_cpus_is_made_by_the_script_that_makes_the_environment():
    environment = dict(
        rest.split("=", 1) for kind, rest in instructions("Dockerfile.cpu") if kind == "ENV"
    )
    assert environment["PATH"].startswith(f"{environment['LIGHTRFT_VENV']}/bin:")
    copied = {
        source
        for kind, rest in instructions("Dockerfile.cpu")
        if kind == "COPY"
        for source in rest.split()[:-1]
    }
    assert ("RUN", "bash scripts/environment.sh") in instructions(
        "Dockerfile.cpu"
    ) and "requirements" in copied
