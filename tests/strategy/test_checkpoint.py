import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.strategy.checkpoint.reader import CheckpointReader
from lightrft.strategy.checkpoint.zero_fragment import SavePlanner
from ranks import run_cases, run_ranks, run_refusals, whole
from strategy.training import (
    distance,
    fill_the_disk,
    load,
    my_rows,
    one_step,
    share_of_loss,
    snapshot,
    strategy,
)


class Run:
    """A model in training, as a trainer would hold it.

    The dropout-like noise makes resumed random states visible.
    """

    def __init__(self, folder: str, root: Path, **args):
        self.strategy = strategy(**args)
        self.root = root
        model = load(folder)
        optimizer = self.strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
        scheduler = self.strategy.create_scheduler(optimizer, "cosine", 2, 8)
        self.model, self.optimizer, self.scheduler = self.strategy.prepare(
            (model, optimizer, scheduler)
        )
        self.metrics: list[tuple] = []

    def steps(self, first: int, last: int) -> "Run":
        for step in range(first, last):
            loss, norm, _ = one_step(
                self.strategy, self.model, self.optimizer, step, scheduler=self.scheduler
            )
            noise = (random.random(), np.random.rand(), torch.rand(1).item())
            self.metrics.append((loss, norm, self.optimizer.param_groups[0]["lr"], *noise))
        return self

    def save(self, tag: str, **options):
        options = {
            "client_state": {"tag": tag},
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        } | options
        return self.strategy.save_ckpt(self.model, self.root, tag, **options)

    def load(self, **options):
        options = {"optimizer": self.optimizer, "scheduler": self.scheduler} | options
        return self.strategy.load_ckpt(self.model, self.root, **options)

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and the optimizer's moments, whole."""
        moments = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                moments[f"{name}/{key}"] = whole(value).clone()
        return snapshot(self.strategy, self.model) | moments


def messages(action):
    """What `action` returns, and the warnings it logged."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    try:
        return action(), "".join(lines)
    finally:
        logger.remove(sink)


# -- resume


def uninterrupted(folder, root):
    run = Run(folder, root).steps(0, 4)
    return run.metrics, run.state()


def interrupted(folder, root):
    """(metrics, state) of a run in one go, and of one that was resumed."""
    whole = uninterrupted(folder, root)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    Run(folder, root).steps(0, 2).save("step2")
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    run = Run(folder, root)
    path, client_state = run.load()
    assert (path, client_state) == (root / "step2", {"tag": "step2"})
    run.steps(2, 4)
    return whole, (run.metrics, run.state())


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_run_is_bit_identical(folder, root, world_size):
    for (whole_metrics, whole_state), (metrics, state) in run_ranks(
        world_size, interrupted, folder, root
    ):
        assert metrics == whole_metrics[2:]
        assert state.keys() == whole_state.keys()
        assert all(torch.equal(state[name], whole_state[name]) for name in state)


def skipped_once(folder, root):
    run = Run(folder, root).steps(0, 1)
    loss = share_of_loss(run.model, my_rows(run.strategy, 1), 50) * float("nan")
    run.strategy.backward(loss, run.model, run.optimizer)
    run.strategy.optimizer_step(run.optimizer, run.model, run.scheduler)
    run.save("step2")
    resumed = Run(folder, root)
    module_only = Run(folder, root)
    assert resumed.load()[1] == {"tag": "step2"}, "the caller's own, and nothing else"
    module_only.load(load_module_only=True)
    return [each.strategy.skipped_steps for each in (run, resumed, module_only)]


def test_skipped_steps_are_counted_on(folder, root):
    assert run_ranks(2, skipped_once, folder, root) == [[1, 1, 0]] * 2


@pytest.mark.slow
def test_tied_model_resumes(tied_folder, root):
    (whole_metrics, _), (metrics, _) = run_ranks(2, interrupted, tied_folder, root)[0]
    assert metrics == whole_metrics[2:]


def never_touched(folder, root):
    """A parameter that gets no gradient has no optimizer state, before and after."""

    def model():
        made = strategy()
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = made.create_optimizer(module, lr=1e-3)
        return made, *made.prepare((module, optimizer))

    def touch(module):
        for parameter in module[0].parameters():
            parameter.grad = torch.ones_like(parameter)

    made, module, optimizer = model()
    touch(module)
    made.optimizer_step(optimizer, module)
    made.save_ckpt(module, root, "one", optimizer=optimizer)
    made, module, optimizer = model()
    made.load_ckpt(module, root, optimizer=optimizer)
    return len(optimizer.state), {state["step"].item() for state in optimizer.state.values()}


def test_untouched_parameters_resume_without_state(root, folder):
    assert run_ranks(2, never_touched, folder, root) == [(2, {1.0})] * 2


def module_only(folder, root):
    run = Run(folder, root).steps(0, 1)
    run.save("step1")
    saved = snapshot(run.strategy, run.model)
    other = Run(folder, root)
    torch.manual_seed(7)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(7))
    other.load(load_module_only=True)

    return (
        distance(snapshot(other.strategy, other.model), saved),
        len(other.optimizer.state),
        torch.rand(1) == expected,
    )


def test_load_module_only_leaves_the_rest(folder, root):
    assert run_ranks(1, module_only, folder, root) == [(0.0, 0, True)]


# -- damage


def load_messages(folder, root, options=None):
    run = Run(folder, root)
    (path, client_state), warnings = messages(lambda: run.load(**(options or {})))
    return path and path.name, client_state, warnings


def save_three(folder, root):
    run = Run(folder, root)
    for tag in ("a", "b", "c"):
        run.steps(0, 1).save(tag)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(2, save_three, folder, root)
    assert (root / "latest").read_text() == "c"
    return root


@pytest.fixture
def three(saved, root) -> Path:
    """Checkpoints a, b and c, to be damaged."""
    return Path(shutil.copytree(saved, root))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def as_pipe(path: Path) -> None:
    """Replace a file by a pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def with_text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content)


def with_entry(**entry: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | entry))


def state_of(content: Any) -> Callable[[Path], None]:
    """Write another state, and a manifest that fits."""

    def written(path: Path) -> None:
        path.write_text(json.dumps(content))
        size = [path.stat().st_size, zlib.crc32(path.read_bytes())]
        manifest = path.with_name("manifest.json")
        files = json.loads(manifest.read_text())["files"]
        with_entry(files=files | {path.name: size})(manifest)

    return written


DAMAGE = [
    *[
        (damage, "manifest.json", "manifest.json cannot be read")
        for damage in (
            with_entry(number="x"),
            with_entry(number=None),
            with_entry(world_size=1.5),
            with_entry(resume=2),
            with_entry(files=[1]),
            with_entry(files={"a": 1}),
            with_entry(files={"a": [1, "x"]}),
            with_entry(files={"a": [1, 2, 3]}),
            with_entry(other=1),
            with_text("[]"),
            with_text("[" * 9000),
            as_pipe,
        )
    ],
    *[
        (state_of(content), "state.json", "state.json")
        for content in ({}, [], {"client": 3}, {"client": {}}, {"client": {"tag": 5}})
    ],
    (with_text("[" * 9000), "state.json", "state.json has 9000 bytes"),
    (as_pipe, "state.json", "state.json: not a regular file"),
    (as_pipe, "__0_0.distcp", "__0_0.distcp: not a regular file"),
    (truncate, "__1_0.distcp", "__1_0.distcp has "),
    (flip, "__0_0.distcp", "__0_0.distcp has changed"),
    (Path.unlink, "random_00001.pt", "random_00001.pt: No such file"),
    (truncate, "manifest.json", "manifest.json cannot be read"),
    (Path.unlink, "manifest.json", "manifest.json cannot be read"),
]


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(folder, saved, tmp_path):
    roots = [Path(shutil.copytree(saved, tmp_path / str(number))) for number in range(len(DAMAGE))]
    for root, (damage, name, _) in zip(roots, DAMAGE, strict=True):
        damage(root / "c" / name)
    options = {"needs": {"tag": str}}
    found = run_cases(2, load_messages, {root: (folder, root, options) for root in roots})
    for (root, results), (*_, says) in zip(found.items(), DAMAGE, strict=True):
        assert [result[:2] for result in results] == [("b", {"tag": "b"})] * 2
        assert says in results[0][2] and str(root / "c") in results[0][2]


def test_the_newest_is_found_whatever_latest_says_and_any_by_its_name(folder, saved, tmp_path):
    roots = {
        latest: Path(shutil.copytree(saved, tmp_path / str(latest)))
        for latest in ("b", "gone", None)
    }
    for latest, root in roots.items():
        (root / "latest").write_text(latest) if latest else (root / "latest").unlink()
    cases = {latest: (folder, root) for latest, root in roots.items()} | {
        "by name": (folder, saved, {"tag": "a"})
    }
    found = {case: results[0][:2] for case, results in run_cases(1, load_messages, cases).items()}
    assert found.pop("by name") == ("a", {"tag": "a"})
    assert found == dict.fromkeys(roots, ("c", {"tag": "c"}))


def test_a_damaged_or_missing_tag_is_an_error(folder, three):
    truncate(three / "c" / "state.json")
    problems = {
        "c": "checkpoint .*c is damaged: state.json has",
        "d": "d is not a complete checkpoint",
    }
    refusals = run_refusals(
        2, load_messages, {tag: (folder, three, {"tag": tag}) for tag in problems}
    )
    assert all(re.search(problems[tag], text) for tag, texts in refusals.items() for text in texts)


def test_no_checkpoint_is_no_error(folder, root):
    assert run_ranks(2, load_messages, folder, root) == [(None, {}, "")] * 2


def without_latest(folder, root):
    run = Run(folder, root)
    run.save("resume")
    run.save("best", save_latest=False)
    return run.load()[0].name, run.load(tag="best")[0].name, (root / "latest").read_text()


def test_a_checkpoint_without_latest_is_loaded_by_tag_only(folder, root):
    assert run_ranks(1, without_latest, folder, root) == [("resume", "best", "resume")]


OTHER_MODELS = {
    r"6 tensors have another shape; .*down_proj.weight is \[64, 192\] in the checkpoint and \[64, 160\] in the model": {
        "intermediate_size": 160
    },
    "8 tensors of the model are not in it, the first is model.layers.0.self_attn.k_proj.bias": {
        "attention_bias": True
    },
    "11 tensors in it are not in the model, the first is model.layers.1.": {
        "layer_types": ["full_attention"],
        "num_hidden_layers": 1,
    },
}


def test_a_checkpoint_of_another_model_is_an_error(folder, saved, tmp_path):
    cases = {}
    for number, (says, change) in enumerate(OTHER_MODELS.items()):
        config = Qwen3Config.from_pretrained(folder)
        config.update(change)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / str(number))
        cases[says] = str(tmp_path / str(number)), saved

    for says, refusals in run_refusals(2, load_messages, cases).items():
        assert all(
            re.search(rf"{saved / 'c'} could not be loaded: rank 0: .*{says}", text)
            for text in refusals
        )


# -- checkpoints that were prepared to run code


class Bomb:
    """Unpickled without care it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "code ran")


def in_the_index(folder: Path, bomb: Bomb) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"path": bomb}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_a_plain_value(folder: Path, bomb: Bomb) -> None:
    """Instead of the decay rates of Adam."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    content = io.BytesIO()
    torch.save({"betas": bomb}, content)
    file = folder / "__0_0.distcp"
    location = next(
        location
        for index, location in metadata.storage_data.items()
        if index.fqn.endswith("param_groups.0.betas")
    )
    location.relative_path = file.name
    location.offset = file.stat().st_size
    location.length = len(content.getvalue())
    with file.open("ab") as tensors:
        tensors.write(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_the_file(name: str):
    def put(folder: Path, bomb: Bomb) -> None:
        torch.save({"bomb": bomb}, folder / name)

    return put


def test_no_checkpoint_runs_code(folder, saved, tmp_path):
    marker = tmp_path / "marker"
    problems = {}
    for number, (put, says) in enumerate(
        [
            (in_the_index, "its index names pathlib.Path.write_text, which could execute code"),
            (in_a_plain_value, "Weights only load failed"),
            *(
                (in_the_file(name), "Weights only load failed")
                for name in ("schedulers.pt", "parts.pt", "random_00000.pt")
            ),
        ]
    ):
        newest = Path(shutil.copytree(saved, tmp_path / str(number))) / "c"
        problems[newest] = says
        put(newest, Bomb(marker))
        content = json.loads((newest / "manifest.json").read_text())
        for name in content["files"]:
            data = (newest / name).read_bytes()
            content["files"][name] = [len(data), zlib.crc32(data)]
        (newest / "manifest.json").write_text(json.dumps(content))

    assert not marker.exists()
    refusals = run_refusals(
        2, load_messages, {newest: (folder, newest.parent) for newest in problems}
    )
    for newest, says in problems.items():
        assert all(
            re.search(rf"{newest} could not be loaded: rank \d: .*{says}", text)
            for text in refusals[newest]
        )

    assert not marker.exists()


def test_an_index_that_names_files_outside_is_refused(three):
    metadata = dcp.FileSystemReader(three / "c").read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../b/__0_0.distcp"
    (three / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="a file outside of it: ../b/__0_0.distcp"):
        CheckpointReader(three / "c").read_metadata()


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, owner: type, name: str):
        self.owner = owner
        self.name = name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_an_index_of_python_3_11_2_is_read_but_no_other_attribute(three):
    metadata = dcp.FileSystemReader(three / "c").read_metadata()
    index = three / "c" / ".metadata"
    stored = next(
        entry
        for entry in metadata.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )

    plain = stored.properties.__getstate__()
    for owner, name in (
        (type(plain[3]), plain[3].name),
        (TensorStorageMetadata, "__init__"),
        (type(plain[3]), "mro"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            state = (*plain[:3], Attribute(owner, name), *plain[4:])
            patch.setattr(TensorProperties, "__getstate__", lambda self, state=state: state)
            index.write_bytes(pickle.dumps(metadata))

        if name == plain[3].name:
            read = CheckpointReader(three / "c").read_metadata()
            assert read.state_dict_metadata == metadata.state_dict_metadata
        else:
            with pytest.raises(
                pickle.UnpicklingError,
                match=f"its index asks for {name} of .*, which could execute code",
            ):
                CheckpointReader(three / "c").read_metadata()


# -- writing


def disk_full(folder, root, bad_rank, limit):
    run = Run(folder, root)
    run.steps(0, 1).save("good")
    before = snapshot(run.strategy, run.model)
    run.steps(1, 2)
    if run.strategy.get_rank() == bad_rank:
        fill_the_disk(limit)

    try:
        run.save("bad")
        raised = ""
    except RuntimeError as error:
        raised = str(error)

    fill_the_disk(resource.RLIM_INFINITY)
    left = sorted(path.name for path in root.iterdir())
    path, _ = run.load()
    found = distance(snapshot(run.strategy, run.model), before)
    run.save("again")

    return raised, left, path.name, found, sorted(path.name for path in root.iterdir())


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(folder, tmp_path):
    cases = (0, 100_000), (1, 100_000), (0, 20_000), (0, 1_000), (1, 1_000)
    roots = {case: tmp_path / str(case) for case in cases}
    found = run_cases(2, disk_full, {case: (folder, root, *case) for case, root in roots.items()})
    for (bad_rank, limit), results in found.items():
        assert results[0] == results[1]
        raised, left, path, distance_to_good, finally_there = results[0]
        assert (
            f"{roots[bad_rank, limit] / 'bad'} could not be written: rank {bad_rank}: OSError:"
            " [Errno 27]" in raised
        )
        assert (left, path, distance_to_good) == (["good", "latest"], "good", 0.0)
        assert finally_there == ["again", "good", "latest"]


def repeated(folder, tied_folder, root):
    """Count the global plans that this rank made for checkpoints.

    There are checkpoints of a model, of another model, and after one that failed.
    """
    made = 0

    def counted(planner, plans, make=DefaultSavePlanner._create_global_plan):
        nonlocal made
        made += 1
        return make(planner, plans)

    def save(run: Run, tag: str) -> int:
        before = made
        run.save(tag)
        return made - before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultSavePlanner, "_create_global_plan", counted)
        run = Run(folder, root)
        other = Run(tied_folder, root / "other")
        counts = [
            save(run.steps(0, 1), "one"),
            save(run.steps(1, 2), "two"),
            save(other.steps(0, 1), "one"),
            save(run, "again"),
        ]
        if run.strategy.get_rank() == 1:
            fill_the_disk(1_000)
        with pytest.raises(RuntimeError, match="could not be written"):
            run.save("bad")
        fill_the_disk(resource.RLIM_INFINITY)
        counts += [save(run, "after"), save(run.steps(2, 3), "last")]
        known = [run.state(), other.state()]
        run.steps(3, 4).load(tag="last")
        other.steps(1, 2).load(tag="one")

    return counts, [
        distance(one.state(), before) for one, before in zip((run, other), known, strict=True)
    ]


@pytest.mark.slow
def test_a_plan_is_used_for_all_checkpoints_with_the_same_tensors(folder, tied_folder, root):
    """The ranks inherit a plan that this process made for one rank, and must not use it."""
    dcp.save(
        {"one": torch.ones(2)}, checkpoint_id=root / "alone", planner=SavePlanner(1), no_dist=True
    )
    (counts, changes), (of_rank_1, others) = run_ranks(2, repeated, folder, tied_folder, root)
    assert counts == [1, 0, 1, 1, 1, 0] and of_rank_1 == [0] * 6, (
        "another model and a failure need another plan"
    )
    assert changes == others == [0.0, 0.0]


def leftovers(folder, root):
    (root / "killed.part").mkdir(parents=True)
    (root / "killed.part" / "file").write_text("half")
    (root / "away").mkdir()
    for name in ("link.part", "a.part", "a.old", "latest.part"):
        (root / name).symlink_to(root / "away")
    (root / "broken.part").symlink_to(root / "nowhere")
    run = Run(folder, root)
    run.save("a")
    run.steps(0, 1).save("a")
    tag_again = snapshot(run.strategy, run.model)
    run.steps(1, 2).load()
    return sorted(path.name for path in root.iterdir()), distance(
        snapshot(run.strategy, run.model), tag_again
    )


def test_half_written_folders_go_and_a_tag_can_be_written_again(folder, root):
    assert run_ranks(1, leftovers, folder, root) == [(["a", "away", "latest"], 0.0)]


def rotation(folder, root, max_num, max_mem):
    (root / "mine").mkdir(parents=True, exist_ok=True)
    run = Run(folder, root)
    for number in range(4):
        run.save(f"step{number}", max_num=max_num, max_mem=max_mem)
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_rotates_by_count(folder, root):
    assert run_ranks(2, rotation, folder, root, 2, 1000)[0] == ["mine", "step2", "step3"]


def test_rotates_by_size_and_the_newest_stays(folder, tmp_path):
    size_of_one = 2.4e6 / 1e9
    assert run_ranks(1, rotation, folder, tmp_path / "two", 9, 2.5 * size_of_one)[0] == [
        "mine",
        "step2",
        "step3",
    ]
    assert run_ranks(1, rotation, folder, tmp_path / "one", 9, 0.1 * size_of_one)[0] == [
        "mine",
        "step3",
    ]


def failed_rotation(folder, root):
    run = Run(folder, root)
    run.save("good", max_num=1)
    fill_the_disk(1000)
    try:
        run.save("bad", max_num=1)
    except RuntimeError:
        return sorted(path.name for path in root.iterdir())


def test_nothing_is_removed_before_the_new_one_is_there(folder, root):
    assert run_ranks(1, failed_rotation, folder, root) == [["good", "latest"]]


def test_manifest_lists_every_other_file(folder, three):
    manifest = json.loads((three / "c" / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in (three / "c").iterdir()} - {
        "manifest.json"
    }
    assert manifest["number"] == 3 and manifest["world_size"] == 2
