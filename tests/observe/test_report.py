"""Why: the report is opened in a browser and shows what a model wrote; it must be true, complete
and unable to act.
"""

import base64
import csv
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO

import pytest
from PIL import Image

from lightrft.cli import report
from lightrft.config import Config
from lightrft.data.media_files import ImageFile
from lightrft.observe.charts import Line, line_chart, nice_ticks, smooth
from lightrft.observe.report import write_report
from lightrft.observe.scoreboard import scoreboard
from lightrft.observe.sinks import JsonLines, read_rows, readable
from lightrft.observe.text import percent
from lightrft.run.sample_rows import sample_rows
from lightrft.types import Prompt, Sample

ATTACK = "<script>alert(1)</script>"


class Page(HTMLParser):
    """What a browser would see: tags, attributes, visible text, hover data."""

    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self, markup):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.open = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps: evaluated twice, step 20 broken, the model's text hostile."""
    folder = tmp_path / "my <run>"
    config = Config()
    config.model.pretrain = "org/tiny"
    config.data.input_template = ATTACK
    config.write(folder / "config.yaml")
    sink = JsonLines(folder)
    sink.start({}, 40)

    for step in range(41):
        if step % 40 == 0:
            sink.log(step, {"eval/accuracy": 0.1 + step / 100})
        if step == 0:
            continue

        norm = float("nan") if step == 20 else 1.0
        row = {
            "rollout/reward": step / 40,
            "train/grad_norm": norm,
            "engine/logprob_mismatch": 1e-6,
        }
        times = {
            "time/generate": 2.0,
            "time/generate/weight_sync": 1.0,
            "time/train": 1.0,
            "time/step": 4.0,
        }
        sink.log(step, row | times | {"mine/own": 3.0})

        text = {
            "prompt": f"{step}+1=",
            "response": f"{ATTACK}\x1b[0m\u202e{step}",
            "label": step + 1,
        }
        sink.samples(step, [text | {"reward": step / 40, "finish_reason": "length", "length": 64}])

    sink.close("finished")
    return folder


def test_model_text_is_shown_and_cannot_act(run):
    markup = write_report(run).read_text(encoding="utf-8")
    page = Page(markup)
    assert page.tags.count("script") == 1 and not page.open
    assert page.text.count(ATTACK) >= 12, "the samples show what the model wrote"
    assert "\\x1b[0m\\u202e40" in page.text and "\x1b" not in markup and "\u202e" not in markup
    assert "my <run>" in page.text and "run>" not in page.tags


def test_nothing_is_loaded_from_anywhere(run):
    markup = write_report(run).read_text(encoding="utf-8")
    page = Page(markup)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    acting = {"src", "href", "xlink:href", "srcset", "action"}
    assert not [name for name, _ in page.attributes if name in acting or name.startswith("on")]
    assert "url(" not in markup and "@import" not in markup
    assert re.findall(r"https?://[^\s'\"]+", markup) == ["http://www.w3.org/2000/svg"], (
        "only SVG's name, which nobody fetches"
    )


def test_the_browser_is_told_to_run_this_script_only(run):
    markup = write_report(run).read_text(encoding="utf-8")
    script = markup[markup.index("<script>") + len("<script>") : markup.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for name, value in Page(markup).attributes if name == "content")
    data = "img-src data:; media-src data:"
    assert (
        policy
        == f"default-src 'none'; {data}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_the_scoreboard_is_that_of_the_bench_command(run):
    found = scoreboard(read_rows(run / "metrics.jsonl"), {})
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert len(found.lines) > 6 and all(line in text for line in found.lines)


def test_curves_samples_and_time_are_there(run):
    page = Page(write_report(run).read_text(encoding="utf-8"))
    titles = ("Reward", "Held-out accuracy", "Gradient norm", "Engine against trainer", "mine/own")
    titles += ("At the beginning", "At the end")
    assert [title for title in titles if title not in page.text] == []
    assert "Not finite at step 20." in page.text and "64 tokens, truncated" in page.text
    # generate and train fill 3 of 4 seconds; the nested weight_sync is a part of generate and not
    # counted twice
    phases = page.text[page.text.index("Mean step") : page.text.index("Samples")]
    shares = re.findall(r"(generate|train|other)(\S+ s)(\d+%)", phases)
    assert shares == [("generate", "2 s", "50%"), ("train", "1 s", "25%"), ("other", "1 s", "25%")]
    hover = [json.loads(value) for name, value in page.attributes if name == "data-hover"]
    reward = next(points for points in hover if points[0][2][1].startswith("reward"))
    assert [reward[0][2], reward[-1][2]] == [["step 1", "reward 0.025"], ["step 40", "reward 1"]]
    assert reward[-1][1][0] < reward[0][1][0], "a higher value is higher on the page"


@pytest.fixture
def groups(tmp_path):
    """Two prompts with a large picture each, as a trainer writes them.

    One is answered eight times and one twice.
    """
    samples = []
    for group, (name, colour, count) in enumerate(
        [("a<b>.png", (255, 0, 0), 8), ("sky.png", (0, 0, 255), 2)]
    ):
        file = BytesIO()
        Image.new("RGB", (2000, 1000), colour).save(file, "PNG")
        prompt = Prompt(
            group,
            f"<img src=x>{group}",
            [5, 6, group],
            multi_modal={"images": [ImageFile(name, file.getvalue())]},
        )
        samples += [
            Sample(prompt, group, [7, n], [0.0, 0.0], f"answer {group}.{n}", "stop", reward=n / 8)
            for n in range(count)
        ]

    sink = JsonLines(tmp_path)
    rows = sample_rows(samples)
    sink.start({}, 1)
    sink.samples(1, rows)
    sink.close("finished")

    return tmp_path, rows


def test_responses_to_one_prompt_are_compared(groups):
    """The best and the worst are among those shown, below one prompt."""
    folder, rows = groups
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert re.findall(r"answer (\d\.\d)", page.text) == ["0.7", "0.5", "0.3", "0.0", "1.1", "1.0"]
    assert (
        page.text.count("<img src=x>0") == 1 and "4 of 8 responses, mean reward 0.438" in page.text
    )
    written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt_token_ids"] for row in written] == [[5, 6, 0]] * 8 + [[5, 6, 1]] * 2
    assert [row["response_token_ids"] for row in written[:3]] == [[7, 0], [7, 1], [7, 2]]
    assert not {"prompt_token_ids", "response_token_ids", "thumbnails"} & set().union(
        *readable(rows)
    )


def test_pictures_are_small_and_inside_the_page(groups):
    folder, rows = groups
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    sources = [value for name, value in page.attributes if name == "src"]
    assert page.tags.count("img") == len(sources) == 2 and ("alt", "a<b>.png") in page.attributes

    for source, colour in zip(sources, [(255, 0, 0), (0, 0, 255)], strict=True):
        kind, _, content = source.partition(",")
        image = Image.open(BytesIO(base64.b64decode(content)))
        assert kind == "data:image/jpeg;base64" and image.size == (160, 80) and len(source) < 5000
        assert max(abs(a - b) for a, b in zip(image.getpixel((80, 40)), colour, strict=True)) < 8

    assert [len(row.get("thumbnails", ())) for row in rows] == [1, *[0] * 7, 1, 0], (
        "a picture is written once for its group"
    )


@pytest.mark.parametrize(
    "uri",
    [
        "https://example.org/x.jpg",
        "data:image/svg+xml;base64,AAAA",
        'data:image/jpeg;base64,AA" onerror="alert(1)',
        7,
        "data:image/jpeg;base64," + "A" * 100_000,
        "data:image/jpeg;base64,AAAA\n",
    ],
)
def test_other_pictures_are_not_shown(tmp_path, uri):
    row = {"prompt": "p", "response": "r", "images": ["x.png"], "thumbnails": [uri]}
    sink = JsonLines(tmp_path)
    sink.start({}, 1)
    sink.samples(1, [row])
    sink.close("finished")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "img" not in page.tags and "x.png" in page.text


def test_headline_numbers_come_from_the_summary_first(run):
    before = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "Held-out accuracy50%at first 10%" in before
    summary = {
        "eval_after_rl": 0.875,
        "wall_s": 754.0,
        "engine": "vllm",
        "world_size": 2,
        "versions": {"torch": "2.13"},
    }
    (run / "run.json").write_text(
        json.dumps({"status": "interrupted", "seconds": 1.5, "engine": "hf"})
    )
    assert "Wall time1.5 s" in Page(write_report(run).read_text(encoding="utf-8")).text
    (run / "summary.json").write_text(json.dumps(summary))
    after = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "Accuracy after RL87.5%" in after and "12 min 34 s" in after
    assert "engine vllm" in after and "status interrupted" in after
    assert "processes 2" in after and "torch 2.13" in after
    assert "at first 10%" not in after


def test_a_reward_is_no_share_and_what_concerns_the_run_is_said(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 2)
    for step in (1, 2):  # all rewards of the first evaluation were 0
        row = {"rollout/reward": 3.74, "eval/reward": 3.74 * (step - 1)}
        sink.log(step, row | ({"eval/accuracy": 0.0} if step == 1 else {}))

    sink.close("finished")
    (tmp_path / "run.json").write_text(
        json.dumps({"run": "c0ffee", "warnings": ["nothing <learned>"]})
    )
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "Held-out reward3.74at first 0" in text and "374" not in text
    assert "nothing <learned>" in text and "c0ffee" not in text


def test_the_sets_of_an_evaluation_share_a_chart(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 2)
    for step in (1, 2):
        sink.log(
            step,
            {"eval/gsm8k/reward": step / 4, "eval/own/reward": step / 8, "eval/own/truncated": 0.0},
        )

    sink.close("finished")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    chart = page.text[page.text.index("Held-out sets") :]
    assert chart.startswith("Held-out sets mean reward of greedy responses0.5")
    assert chart.index("gsm8kown") < chart.index("truncated")


def test_a_report_is_made_of_what_can_be_read(tmp_path):
    rows = [
        b'{"step": %d, "rollout/reward": %s}' % (step, value)
        for step, value in enumerate([b'"text"', b"0.5", b"[1]"])
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*rows, b"[" * 9000, b""]))
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / "summary.json").write_text("{")
    assert "0.5" in write_report(tmp_path).read_text()


def test_a_supervised_run(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 3)
    for step in range(1, 4):
        sink.log(step, {"train/loss": 1.0 / step})
    sink.close("finished")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Supervised fine-tuning, 3 steps" in page.text and "Loss" in page.text
    assert "Samples" not in page.text and "Reward" not in page.text and page.tags.count("svg") == 1


JUDGED = {
    "train_dpo": ["accuracy", "margin", "reward_chosen", "reward_rejected"],
    "train_kto": ["accuracy", "reward_desirable", "reward_undesirable"],
    "train_rm": ["accuracy", "margin", "reward_chosen", "reward_rejected"],
    "train_prm": ["accuracy", "probability_right", "probability_wrong"],
}


@pytest.mark.parametrize("command", JUDGED)
def test_a_run_on_judged_answers_shows_what_it_is_about(tmp_path, command):
    sink = JsonLines(tmp_path)
    sink.start({}, 3)
    for step in range(1, 4):
        values = {
            f"{when}/{name}": step / 4 for name in JUDGED[command] for when in ("train", "eval")
        }
        sink.log(step, values | {"train/loss": 1.0, "eval/loss": 2.0})

    sink.close("finished")
    (tmp_path / "run.json").write_text(json.dumps({"command": command, "status": "finished"}))
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert (
        "Accuracy75%at first 25%" in text
        and "Held-out loss2" in text
        and "Reinforcement" not in text
    )
    others = text.partition("Other metrics")[2].partition("Setup")[0]
    assert not any(f"train/{name}" in others for name in JUDGED[command])


def test_results_come_before_sizes_and_the_setup_comes_last(run):
    """Nothing is shown that says nothing.

    Examples are an empty device, ids of processes, and a count that repeats another.
    """
    (run / "run.json").write_text(
        json.dumps(
            {
                "run": "c0ffee",
                "process": "process 5096 on vm",
                "launchers": ["x"],
                "device": "",
                "status": "finished",
                "parameters": 157120,
                "active_parameters": 157120,
                "weight_bytes": 628480,
                "engine": "hf",
                "seconds": 3.0,
            }
        )
    )
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert (
        text.index("Held-out accuracy")
        < text.index("Parameters")
        < text.index("Setup")
        < text.index("engine hf")
    )
    assert "5096" not in text and "c0ffee" not in text and "Active parameters" not in text
    assert "device" not in text[text.index("Setup") :]


def test_samples_that_were_not_written_are_said(groups):
    folder, _ = groups
    assert "are written to samples.jsonl" not in write_report(folder).read_text(encoding="utf-8")
    config = Config()
    config.rollout.n_samples_per_prompt = 16
    config.write(folder / "config.yaml")
    assert "Of the 16 responses to a prompt, 8 are written to samples.jsonl" in write_report(
        folder
    ).read_text(encoding="utf-8")


def test_shares_that_are_zero_have_an_axis_from_zero():
    assert "-100%" not in line_chart([Line("below", [(1, 0.0), (2, 0.0)])], form=percent)


def test_runs_are_compared(run, tmp_path, capsys):
    """The curves of runs share charts; numbers and different settings are tables.

    Hostile names do nothing.
    """
    other = run.with_name("other")
    shutil.copytree(run, other)
    (other / "config.yaml").write_text(
        (other / "config.yaml").read_text().replace("seed: 42", "seed: 7")
    )
    report.main([str(run), str(other), "--out", str(tmp_path / "both.html"), "--csv"])
    page = Page((tmp_path / "both.html").read_text(encoding="utf-8"))
    settings = page.text[page.text.index("Settings that differ") :]
    assert "--seed427" in settings and "pretrain" not in settings
    assert page.text.count("my <run>other") > 4 and "script" not in page.tags[:3]
    table = list(csv.DictReader((run / "metrics.csv").open()))
    assert (
        len(table) == len(read_rows(run / "metrics.jsonl"))
        and table[1]["rollout/reward"] == "0.025"
    )
    with pytest.raises(SystemExit):
        report.main([str(run), str(tmp_path)])
    assert "is not the folder of a run with metrics" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_step_and_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        write_report(tmp_path)
    Config().write(tmp_path / "config.yaml")
    assert "No step has been finished yet" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-0.07, 0.013), (1e-9, 3e-9), (0.5, 123456), (999.9, 1000.1)]
)
def test_ticks_are_few_and_enclose_the_values(low, high):
    ticks = nice_ticks(low, high)
    rounding = 1e-9 * (high - low)
    assert 2 <= len(ticks) <= 5 and ticks[0] <= low + rounding and ticks[-1] >= high - rounding
    assert ticks == sorted(set(ticks))


def test_tick_labels_tell_neighbours_apart():
    markup = line_chart([Line("x", [(1, 999.9), (2, 1000.1)])])
    assert re.findall(r'text-anchor="end">([^<]*)<', markup) == [
        "999.9",
        "999.95",
        "1,000",
        "1,000.05",
        "1,000.1",
    ]


def test_a_long_curve_is_thinned_without_losing_its_spike():
    points = [(step, 1.0) for step in range(20_000)]
    points[12_345] = (12_345, 50.0)
    markup = line_chart([Line("norm", points)])
    assert len(markup) < 60_000 and "norm 50" in markup


def test_degenerate_curves_are_drawn():
    rounded = [(1, 0.0030000000000000005), (2, 0.003)]
    for points in ([(1, 1.0)], [(1, None)], [(1, 0.0), (2, 0.0)], [(5, None), (6, 2.0)], rounded):
        for log in (False, True):
            markup = line_chart([Line("x", points)], log=log)
            assert "nan" not in markup and "inf" not in markup.replace("not finite", "").replace(
                "no finite", ""
            )


def test_smoothing_keeps_constants_gaps_and_the_geometric_mean():
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    assert smooth([1.0, None, 1.0])[1] is None
    assert smooth([1e-6, 1e-4], log=True) == pytest.approx([1e-5, 1e-5])
