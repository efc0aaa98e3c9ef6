"""Reports: what is in them, that they need no network, and that the commands they name make their numbers again."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlvr_pl.cli import main
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.report.page import write_report

HOSTILE = "</pre><script>alert(1)</script> & <b>soup</b> | pipe ``` `x` \\boxed{1}"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Page(HTMLParser):
    """The tables, pictures, anchors and scripts of a page, and whether its tags are balanced."""

    VOID = ("meta", "link", "img", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.preformatted = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "action") if name in values]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "figcaption":
            self.captions.append("")
        elif tag == "img":
            self.images.append(values["src"])
            assert values["alt"]
        elif tag == "script":
            self.scripts += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if "figcaption" in self.open:
            self.captions[-1] += data
        if self.open and self.open[-1] == "pre":
            self.preformatted += data


@pytest.fixture(scope="module")
def study_report(tmp_path_factory, write_recorded):
    folder = write_recorded(tmp_path_factory.mktemp("report")).path
    write_report(folder, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def run_report(tmp_path_factory, write_run):
    tmp_path = tmp_path_factory.mktemp("lone")
    right = [1] * 24 + [0] * 16
    texts = {"text": HOSTILE, "rule": CollapseCriterion.from_start(24, window=2)}
    run = write_run(tmp_path / "lone", [1, 0, 4, 6], {0: right, 2: right, 4: right[::-1]}, [0.5] * 5, **texts)
    write_report(run, tmp_path / "lone.html")
    return tmp_path / "lone.html"


def commands(report: Path) -> list[list[str]]:
    text = report.with_suffix(".md").read_text()
    found = re.findall(r"^Again: `(rlvr-pl .*)`$", text, re.M)
    for block in re.findall(r"^Again:\n\n```text\n(.*?)\n```$", text, re.M | re.S):
        found += block.splitlines()
    return [shlex.split(line)[1:] for line in found]


def test_a_study_report_has_the_papers_tables_and_pictures(study_report):
    page = Page(study_report.read_text())
    assert page.open == []
    names = [caption.split(".")[0] for caption in page.captions]
    for name in ("Expectations", "Differences", "Table 1", "Table 1b", "Table 2", "Table 3", "Table 4", "Table 4b"):
        assert name in names
    assert {"Power", "Costs", "Runs", "Figure 1", "Figure 2", "Figure 3", "Figure 4"} <= set(names)
    assert len(page.images) == 4
    cells = {cell for table in page.tables for row in table for cell in row}
    # supplied lost 16 and gained none of 40 items: -40 pp; updates 3-4 were cut off for 5/8 on average
    assert "yes (updates 3–4)" in cells and "0 / 16" in cells
    assert "held" in cells and "did not hold" in cells


def test_expectations_are_reported_as_they_came_out(study_report):
    page = Page(study_report.read_text())
    table = next(t for t in page.tables if t[0][0] == "Expected")
    outcomes = {row[0]: row[1] for row in table[1:]}
    assert outcomes["supplied collapses"] == "held"
    assert outcomes["mask gains on start"] == "did not hold"


@pytest.mark.parametrize("which", ["study_report", "run_report"])
def test_nothing_comes_from_elsewhere(which, request):
    page = Page(request.getfixturevalue(which).read_text())
    assert page.scripts == 0
    for link in page.links:
        assert link.startswith("data:") or link.removeprefix("#") in page.ids, link
    for image in page.images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        picture = ElementTree.fromstring(base64.b64decode(data))
        assert picture.tag.endswith("svg")
        text = base64.b64decode(data).decode()
        assert not re.search(r"(href|src)=\"(?!#)", text) and "@import" not in text


def test_rollouts_are_shown_as_text_whatever_they_say(run_report):
    page = Page(run_report.read_text())
    assert HOSTILE in page.preformatted
    assert HOSTILE in run_report.with_suffix(".md").read_text()
    assert "````text" in run_report.with_suffix(".md").read_text()  # a longer fence than any in the rollout


@pytest.mark.parametrize("which", ["study_report", "run_report"])
def test_every_command_it_names_works(which, request, capsys):
    """All but those that load a model or draw."""
    named = commands(request.getfixturevalue(which))
    assert {"compare", "noise-floor", "power", "rollout-stats", "cost"} <= {words[0] for words in named}
    for words in named:
        if words[0] not in ("drift", "plot", "study"):
            assert main([*words, "--json"]) == 0, words
            assert json.loads(capsys.readouterr().out)


def test_the_commands_make_the_numbers_again(study_report, capsys):
    text = study_report.with_suffix(".md").read_text()
    table = text[text.index("**Table 1.**") : text.index("**Table 1b.**")]
    words = shlex.split(re.search(r"`rlvr-pl (.*)`", table)[1])
    assert main([*words, "--json"]) == 0
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "update" in line]
    for row, found in zip(rows, json.loads(capsys.readouterr().out)["comparisons"], strict=True):
        values = [float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+\.\d", row[3])]
        # printed to one decimal: 0.05 is its rounding
        assert values == pytest.approx([found["delta_pp"], found["ci_low"], found["ci_high"]], abs=0.05001)
        assert row[4].startswith(f"{found['gained']} / {found['lost']}")


def test_equal_records_give_equal_bytes(tmp_path, study_report):
    write_report(study_report.parent, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == study_report.read_bytes()


def test_a_bare_run_gets_a_report_of_what_it_has(tmp_path, write_run):
    run = write_run(tmp_path / "bare", [1, 0], {}, [0.5, 0.5, 0.5], rule=None)
    for name in ("drift.csv", "validation.csv", "cost.json", "metrics.csv"):
        (run / name).unlink()
    write_report(run, tmp_path / "bare.html")
    names = [caption.split(".")[0] for caption in Page((tmp_path / "bare.html").read_text()).captions]
    assert names == ["Table 4b", "Figure 3", "Figure 4", "Power", "Runs"]


def test_table_5_where_the_entropy_gradient_was_measured(tmp_path, write_run):
    run = write_run(tmp_path / "r", [1, 0], {0: [1, 0], 2: [1, 1]}, [0.5] * 3)
    rollouts = [
        {"uid": f"u{g}", "advantage": 1.0 - 2 * (i % 2), "length": 10, "truncated": False, "slope": -50.0}
        for g in range(3)
        for i in range(4)
    ]
    direction = {"slope": 128.0, "ci_low": 42.0, "ci_high": 218.0, "cosine": 0.24, "sign_step": 0.0045}
    batch = {
        "record": "entropy-grad",
        "checkpoint": "embedded:start",
        "checkpoint_sha256": "a" * 64,
        "directions": {"seq": {**direction, "adamw": None, "adamw_clip": None}},
        "random_sign_step": 0.0,
        "rollouts": rollouts,
    }
    (run / "entropy_grad_1.json").write_text(json.dumps(batch))
    write_report(run, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    cells = [row for table in page.tables for row in table]
    assert ["1", "seq", "+128.0 [+42.0, +218.0]", "+0.24", "+4.5e-03"] in cells
    # every token moves H by -50 / 10 = -5, whatever its class
    assert ["positive", "6", "10", "−5.00", "1.00"] in cells


MISTAKES = {
    "nowhere": "neither a run folder",
    "lone --out x.pdf": "the ending must be .html",
    "lone --out nowhere/x.html": "the folder nowhere does not exist",
    "lone --out lone.html": "exists; choose another name or pass --overwrite",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(run_report, monkeypatch, capsys, words):
    monkeypatch.chdir(run_report.parent)
    assert main(["report", *words.split()]) == 2
    told = capsys.readouterr().err
    assert MISTAKES[words] in told and told.strip().count("\n") == 0, told


def test_the_command_writes_both_files(run_report, capsys):
    assert main(["report", str(run_report.parent / "lone"), "--out", "new.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["html"]).exists() and Path(told["markdown"]).exists()
    assert "Table 1" in told["tables"] and "Figure 4" in told["figures"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome here to open the page with")
@pytest.mark.parametrize("which", ["study_report", "run_report"])
def test_a_browser_opens_it_without_a_complaint(tmp_path, which, request):
    """A script appended to a copy notes what the browser made of the page; there is no network in the meantime."""
    note = """<script>addEventListener("load", () => { document.body.dataset.seen = JSON.stringify({
      widths: [...document.images].map(i => i.naturalWidth), tables: document.querySelectorAll("table tbody tr").length,
      overflow: document.documentElement.scrollWidth - innerWidth }); console.log("page loaded"); });</script>"""
    text = request.getfixturevalue(which).read_text()
    copy = tmp_path / "copy.html"
    copy.write_text(text + note)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,900"]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    done = subprocess.run(
        [str(CHROMIUM), *words, offline, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(console) == 1 and "page loaded" in console[0], console
    seen = json.loads(re.search(r'data-seen="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    page = Page(text)
    assert len(seen["widths"]) == len(page.images) and all(width > 100 for width in seen["widths"])
    assert seen["tables"] == sum(len(table) - 1 for table in page.tables)
    assert seen["overflow"] <= 0  # wide tables scroll in their own frame
