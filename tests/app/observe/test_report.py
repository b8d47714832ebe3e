"""Why: the report is opened in a browser and shows what a model wrote; it must be true, complete
and unable to act.
"""

import base64
import csv
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from io import BytesIO

import pytest
from PIL import Image

from lightrft.app.observe.curves import curves, smooth
from lightrft.app.observe.report import PAGE_TEMPLATE, write_report
from lightrft.app.observe.scoreboard import scoreboard
from lightrft.app.observe.sinks import JsonLines, read_rows, readable, sample_rows
from lightrft.config import Config
from lightrft.config.extras import extra, installed
from lightrft.core.samples import Prompt, Sample
from lightrft.data.media_files import ImageFile

ATTACK = "<script>alert(1)</script>"


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
drawn = pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")

HOVER = """<script>
for (const svg of document.querySelectorAll('svg')) {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right, clientY: box.top + 9}));
}
</script>"""
"""Move the pointer to the last step of each chart."""


PLACES = ("d", "x", "y", "cx", "cy", "width", "height", "aria-label")


class Page(HTMLParser):
    """What a browser shows: tags, attributes, and text outside of scripts."""

    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self, markup):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.axes = []
        """Labels of the value axis of each chart."""
        self.open = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "svg":
            self.axes.append([])
        if ("text-anchor", "end") in attributes:
            self.axes[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"], ["noscript"], ["title"]):
            self.text += data
        if self.open[-1:] == ["text"] and self.axes[-1] and not self.axes[-1][-1]:
            self.axes[-1][-1] = data

    def drawn(self):
        """Return all numbers that place something, and the text."""
        return " ".join(value for name, value in self.attributes if name in PLACES) + self.text


def data_of(path):
    """Return the data that a page embeds."""
    markup = path.read_text(encoding="utf-8")
    begin = '<script id="data" type="application/json">'
    return json.loads(markup.partition(begin)[2].partition("</script>")[0])


def show(path, folder, extra=""):
    """Open a page in a browser; return what it shows.

    A script in `extra` runs at the end, and therefore the page's policy is left out.
    """
    if extra:
        markup = re.sub("<meta http-equiv.*>", "", path.read_text(encoding="utf-8"))
        path = folder / "extra.html"
        path.write_text(markup + extra, encoding="utf-8")

    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}/browser", path.resolve().as_uri()]
    result = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return Page(result.stdout.decode())


def texts(data):
    """Return all texts of the data, one to a line."""
    if isinstance(data, dict):
        return "\n".join(map(texts, [*data, *data.values()]))
    return "\n".join(map(texts, data)) if isinstance(data, list) else str(data)


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


def test_model_text_is_embedded_and_cannot_act(run):
    path = write_report(run)
    markup = path.read_text(encoding="utf-8")
    page = Page(markup)
    assert page.tags.count("script") == 2 and not page.open
    assert "<script>alert" not in markup
    assert texts(data_of(path)).count(ATTACK) >= 12, "the samples show what the model wrote"
    assert "\x1b" not in markup and "\u202e" not in markup
    assert "\\x1b[0m\\u202e40" in texts(data_of(path))
    assert data_of(path)["title"] == "my <run>" and "run>" not in page.tags


@drawn
def test_model_text_is_shown_and_does_not_act(run, tmp_path):
    page = show(write_report(run), tmp_path)
    assert page.tags.count("script") == 2 and not page.open
    assert page.text.count(ATTACK) >= 12
    assert "\\x1b[0m\\u202e40" in page.text
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


def test_the_script_never_makes_markup_of_text():
    script = PAGE_TEMPLATE.read_text(encoding="utf-8").partition("<script>")[2]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(", script
    )


def test_the_browser_is_told_to_run_this_script_only(run):
    markup = write_report(run).read_text(encoding="utf-8")
    script = markup.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for name, value in Page(markup).attributes if name == "content")
    data = "img-src data:; media-src data:"
    assert (
        policy
        == f"default-src 'none'; {data}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_the_script_parses(tmp_path):
    script = (
        PAGE_TEMPLATE.read_text(encoding="utf-8").partition("<script>")[2].partition("</script>")[0]
    )
    (tmp_path / "report.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "report.js"], check=True, timeout=60)


def test_the_scoreboard_is_that_of_the_bench_command(run):
    found = scoreboard(read_rows(run / "metrics.jsonl"), {})
    lines = data_of(write_report(run))["speed"].splitlines()
    assert len(lines) > 6 and lines == found.lines


def test_curves_samples_and_time_are_embedded(run):
    data = data_of(write_report(run))
    ((name, metrics),) = data["runs"]
    assert name == "my <run>" and metrics["mine/own"]["values"] == [3.0] * 40
    assert metrics["train/grad_norm"]["values"].index(None) == 19
    reward = metrics["rollout/reward"]
    assert [reward["steps"][0], reward["values"][0], reward["last"]] == [1, 0.025, 1.0]
    assert [end["title"] for end in data["samples"]["ends"]] == ["At the beginning", "At the end"]
    assert "64 tokens, truncated" in texts(data["samples"])
    # generate and train fill 3 of 4 seconds; the nested weight_sync is counted in generate and not
    # counted twice
    phases = {phase["label"]: phase["mean"] for phase in data["time"]["phases"]}
    assert phases == {"generate": 2.0, "train": 1.0, "other": 1.0} and data["time"]["mean"] == 4.0


@drawn
def test_curves_samples_and_time_are_drawn(run, tmp_path):
    page = show(write_report(run), tmp_path, HOVER)
    titles = ("Reward", "Held-out accuracy", "Gradient norm", "Engine against trainer", "mine/own")
    titles += ("At the beginning", "At the end", "Speed", "Setup", "Resolved configuration")
    assert [title for title in titles if title not in page.text] == []
    assert "Not finite at step 20." in page.text and "64 tokens, truncated" in page.text
    phases = page.text[page.text.index("Mean step") : page.text.index("Samples")]
    shares = re.findall(r"(generate|train|other)(\S+ s)(\d+%)", phases)
    assert shares == [("generate", "2 s", "50%"), ("train", "1 s", "25%"), ("other", "1 s", "25%")]
    assert "step 40\nreward 1" in page.text, "the pointer shows the values of a step"
    assert "step 40\ngenerate 2 s\ntrain 1 s\nother 1 s" in page.text
    assert ("aria-label", "reward: 0.025 at step 1, 1 at step 40") in page.attributes
    drawn = next(value for name, value in page.attributes if name == "d" and "L" in value)
    heights = [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", drawn)]
    assert heights[-1] < heights[0], "a higher value is higher on the page"


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
    text = texts(data_of(write_report(folder)))
    assert re.findall(r"answer (\d\.\d)", text) == ["0.7", "0.5", "0.3", "0.0", "1.1", "1.0"]
    assert text.count("<img src=x>0") == 1 and "4 of 8 responses, mean reward 0.438" in text
    written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt_token_ids"] for row in written] == [[5, 6, 0]] * 8 + [[5, 6, 1]] * 2
    assert [row["response_token_ids"] for row in written[:3]] == [[7, 0], [7, 1], [7, 2]]
    assert not {"prompt_token_ids", "response_token_ids", "thumbnails"} & set().union(
        *readable(rows)
    )


def test_pictures_are_small_and_inside_the_page(groups):
    folder, rows = groups
    (end,) = data_of(write_report(folder))["samples"]["ends"]
    pictures = [picture for group in end["groups"] for picture in group["images"]]
    assert [name for _, name in pictures] == ["a<b>.png", "sky.png"]
    sources = [source for source, _ in pictures]

    for source, colour in zip(sources, [(255, 0, 0), (0, 0, 255)], strict=True):
        kind, _, content = source.partition(",")
        image = Image.open(BytesIO(base64.b64decode(content)))
        assert kind == "data:image/jpeg;base64" and image.size == (160, 80) and len(source) < 5000
        assert max(abs(a - b) for a, b in zip(image.getpixel((80, 40)), colour, strict=True)) < 8

    assert [len(row.get("thumbnails", ())) for row in rows] == [1, *[0] * 7, 1, 0], (
        "a picture is written once for its group"
    )


@drawn
def test_pictures_and_texts_are_drawn_as_what_they_are(groups, tmp_path):
    folder, _ = groups
    page = show(write_report(folder), tmp_path)
    sources = [value for name, value in page.attributes if name == "src"]
    assert page.tags.count("img") == len(sources) == 2 and ("alt", "a<b>.png") in page.attributes
    assert page.text.count("<img src=x>0") == 1
    assert re.findall(r"answer (\d\.\d)", page.text) == ["0.7", "0.5", "0.3", "0.0", "1.1", "1.0"]


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
    (group,) = data_of(write_report(tmp_path))["samples"]["ends"][0]["groups"]
    assert group["images"] == [] and group["notes"] == ["x.png"]


def test_headline_numbers_come_from_the_summary_first(run):
    assert ["Held-out accuracy", "50%", "at first 10%"] in data_of(write_report(run))["tiles"]
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
    assert ["Wall time", "1.5 s", ""] in data_of(write_report(run))["tiles"]
    (run / "summary.json").write_text(json.dumps(summary))
    after = data_of(write_report(run))
    tiles = [["Accuracy after RL", "87.5%", ""], ["Wall time", "12 min 34 s", ""]]
    assert [tile for tile in tiles if tile not in after["tiles"]] == []
    setup = [["engine", "vllm"], ["status", "interrupted"], ["processes", "2"], ["torch", "2.13"]]
    assert [fact for fact in setup if fact not in after["setup"]] == []
    assert "at first 10%" not in texts(after["tiles"])


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
    data = data_of(write_report(tmp_path))
    assert ["Held-out reward", "3.74", "at first 0"] in data["tiles"]
    assert data["warnings"] == ["nothing <learned>"] and "c0ffee" not in texts(data)


@drawn
def test_the_sets_of_an_evaluation_share_a_chart(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 2)
    for step in (1, 2):
        sink.log(
            step,
            {"eval/gsm8k/reward": step / 4, "eval/own/reward": step / 8, "eval/own/truncated": 0.0},
        )

    sink.close("finished")
    (tmp_path / "run.json").write_text(json.dumps({"warnings": ["nothing <learned>"]}))
    page = show(write_report(tmp_path), tmp_path)
    assert "nothing <learned>" in page.text
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
    ((_, metrics),) = data_of(write_report(tmp_path))["runs"]
    assert metrics["rollout/reward"]["values"] == [0.5]


def test_a_supervised_run(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 3)
    for step in range(1, 4):
        sink.log(step, {"train/loss": 1.0 / step})
    sink.close("finished")
    data = data_of(write_report(tmp_path))
    assert data["lead"] == "Supervised fine-tuning, 3 steps" and list(data["runs"][0][1]) == [
        "train/loss"
    ]
    assert data["samples"] is None and "Reward" not in texts(data["tiles"])
    if BROWSER:
        page = show(tmp_path / "report.html", tmp_path)
        assert "Samples" not in page.text and page.tags.count("svg") == 1


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
    data = data_of(write_report(tmp_path))
    assert ["Accuracy", "75%", "at first 25%"] in data["tiles"]
    assert "Held-out loss" in texts(data["tiles"]) and "Reinforcement" not in data["lead"]
    if BROWSER:
        text = show(tmp_path / "report.html", tmp_path).text
        others = text.partition("Other metrics")[2].partition("Setup")[0]
        assert not any(f"train/{name}" in others for name in JUDGED[command])


@drawn
def test_roles_of_agents_share_a_chart(tmp_path):
    sink = JsonLines(tmp_path)
    sink.start({}, 2)
    for step in (1, 2):
        of_roles = {"reward/solver": 0.5, "reward/judge": 0.25, "episodes/turns_of_judge": 2.0}
        sink.log(step, of_roles | {"rollout/reward": 0.75})
    sink.close("finished")
    page = show(write_report(tmp_path), tmp_path)
    charts, _, others = page.text.partition("Other metrics")
    places = [charts.index(word) for word in ("Reward of roles", "solver", "judge")]
    assert places == sorted(places) and "Turns of roles" in charts
    assert "reward/solver" not in page.text and "turns_of" not in others


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
                "parameters": 139362304,
                "active_parameters": 139362304,
                "rollout_ranks": 0,
                "weight_bytes": 628480,
                "engine": "hf",
                "seconds": 3.0,
            }
        )
    )
    data = data_of(write_report(run))
    labels = [label for label, _, _ in data["tiles"]]
    assert "Held-out accuracy" in labels and not {"Parameters", "Rollout ranks", "Weight bytes"} & {
        *labels
    }
    assert ["parameters", "139,362,304"] in data["setup"]
    assert "processes that generate" not in dict(data["setup"])
    assert ["engine", "hf"] in data["setup"] and "device" not in dict(data["setup"])
    assert not re.search("5096|c0ffee|parameters for a token", texts(data))
    if BROWSER:
        text = show(run / "report.html", run).text
        assert text.index("Held-out accuracy") < text.index("Setup") < text.index("engine hf")


def test_samples_that_were_not_written_are_said(groups):
    folder, _ = groups
    assert data_of(write_report(folder))["samples"]["note"] == ""
    config = Config()
    config.rollout.n_samples_per_prompt = 16
    config.write(folder / "config.yaml")
    said = "Of the 16 responses to a prompt, 8 are written to samples.jsonl"
    assert data_of(write_report(folder))["samples"]["note"].startswith(said)


@pytest.mark.skipif(not installed(), reason="the command is an extra")
def test_runs_are_compared(run, tmp_path, capsys):
    """The curves of runs share charts; numbers and different settings are tables.

    Hostile names do nothing.
    """
    other = run.with_name("other")
    shutil.copytree(run, other)
    (other / "config.yaml").write_text(
        (other / "config.yaml").read_text().replace("seed: 42", "seed: 7")
    )
    extra("lightrft report").main(
        [str(run), str(other), "--out", str(tmp_path / "both.html"), "--csv"]
    )
    data = data_of(tmp_path / "both.html")
    assert [name for name, _ in data["runs"]] == ["my <run>", "other"]
    assert data["differences"] == [["--seed", "42", "7"]]
    if BROWSER:
        page = show(tmp_path / "both.html", tmp_path)
        settings = page.text[page.text.index("Settings that differ") :]
        assert "--seed427" in settings and "pretrain" not in settings
        assert "Reward mean per response0.8870.887" in page.text
        assert page.text.count("my <run>other") > 4 and page.tags.count("script") == 2

    table = list(csv.DictReader((run / "metrics.csv").open()))
    assert (
        len(table) == len(read_rows(run / "metrics.jsonl"))
        and table[1]["rollout/reward"] == "0.025"
    )
    with pytest.raises(SystemExit):
        extra("lightrft report").main([str(run), str(tmp_path)])
    assert "is not the folder of a run with metrics" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_step_and_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        write_report(tmp_path)
    Config().write(tmp_path / "config.yaml")
    assert data_of(write_report(tmp_path))["runs"][0][1] == {}
    if BROWSER:
        assert "No step has been finished yet" in show(tmp_path / "report.html", tmp_path).text


def test_smoothing_keeps_constants_gaps_and_the_geometric_mean():
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    assert smooth([1.0, None, 1.0])[1] is None
    assert smooth([1e-6, 1e-4], log=True) == pytest.approx([1e-5, 1e-5])


def test_a_long_curve_is_thinned_without_losing_its_spike():
    points = [(step, 1.0) for step in range(20_000)]
    points[12_345] = (12_345, 50.0)
    curve = curves({"norm": points})["norm"]
    assert len(curve["steps"]) < 400 and max(curve["values"]) == 50.0
    assert curve["steps"][curve["values"].index(50.0)] == 12_345


UNDRAWN = re.compile("NaN|Infinity|undefined")
RANGES = [(0, 1), (-0.07, 0.013), (1e-9, 3e-9), (0.5, 123456), (999.9, 1000.1)]
DEGENERATE = [
    {1: 1.0},
    {1: None},
    {1: 0.0, 2: 0.0},
    {5: None, 6: 2.0},
    {1: 0.0030000000000000005, 2: 0.003},
    {1: -1.0, 2: -2.0},
]


@drawn
def test_axes_are_round_and_degenerate_curves_are_drawn(tmp_path):
    # Axes of fewer values that hardly differ are not magnified.
    ranges = {
        f"mine/{n}": {1: low, 2: high, 3: low, 4: high, 5: low, 6: high}
        for n, (low, high) in enumerate(RANGES)
    }
    curves = {f"other/{n}": values for n, values in enumerate(DEGENERATE)}
    shares = {"rollout/truncated": {1: 0.0, 2: 0.0}}
    page = show(write_metrics(tmp_path / "linear", ranges | curves | shares), tmp_path)
    assert len(page.axes) == len(ranges | curves | shares) and not UNDRAWN.search(page.drawn())
    assert page.axes[0][0] == "0%", "a share of zero has an axis from zero"

    for (low, high), labels in zip(RANGES, page.axes[1:], strict=False):
        ticks = [float(label.replace(",", "")) for label in labels]
        rounding = 1e-9 * (high - low)
        assert 2 <= len(ticks) <= 5 and ticks[0] <= low + rounding and ticks[-1] >= high - rounding
        assert ticks == sorted(set(ticks))

    near = page.axes[len(RANGES)]
    assert near == ["999.9", "999.95", "1,000", "1,000.05", "1,000.1"], "neighbours differ"


@drawn
@pytest.mark.slow
@pytest.mark.parametrize("values", DEGENERATE)
def test_degenerate_curves_have_a_logarithmic_axis_too(tmp_path, values):
    page = show(write_metrics(tmp_path / "run", {"engine/logprob_mismatch": values}), tmp_path)
    assert len(page.axes) == 1 and len(page.axes[0]) >= 2 and not UNDRAWN.search(page.drawn())


def write_metrics(folder, metrics):
    """Write the report of a run with these values by step; return the path."""
    folder.mkdir()
    rows = [
        {"step": step, name: value}
        for name, each in metrics.items()
        for step, value in each.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(folder)
