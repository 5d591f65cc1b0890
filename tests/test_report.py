"""Reports: every figure is the summary's, whatever texts say is escaped, runs are not mixed."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import make_arms, make_lines, write_run
from typer.testing import CliRunner

from pyramidkv.cli import app
from pyramidkv.errors import PyramidKVError
from pyramidkv.evaluation import html
from pyramidkv.evaluation.folders import EvaluationError, read_lines
from pyramidkv.evaluation.report import needle_means, read_sections, series, worst_losses
from pyramidkv.evaluation.report_page import make_page, make_pictures
from pyramidkv.evaluation.summary import summarise
from pyramidkv.plots.evaluation import draw_needles

pytest.importorskip("matplotlib")

ARMS = make_arms(("snapkv", "pyramidkv"), (64, 128))
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that tags balance, and collects what a page says."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words, self.rows, self.ids = [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        assert len(dict(attributes)) == len(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def said(self):
        return "".join(self.words)


def page_of(*folders):
    sections = read_sections(folders)
    return make_page(sections, make_pictures(sections))


@pytest.fixture(scope="module")
def lines():
    return make_lines(ARMS, ("find", "trace"), count=10)


@pytest.fixture(scope="module")
def page(lines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, lines, ARMS)
    return page_of(folder)


def test_every_figure_is_the_summarys(lines, page):
    rows = Reader(page).rows
    for group in summarise(lines, ARMS).values():
        for arm, told in group["arms"].items():
            low, high = (100 * bound for bound in told["interval"])
            row = [arm, f"{100 * told['score']:.1f} ({low:.1f} to {high:.1f})"]
            if arm == "full":
                row.append("–")
            else:
                row.append(difference(told))
            row.append(f"{told['kept_tokens']:,.1f}")
            matching = [found for found in rows if found[:4] == row]
            assert any(found[5] == f"{100 * told['footprint']:.1f}" for found in matching)
        for pair in group["pairs"]:
            low, high = pair["difference_interval"]
            sure = "excludes 0" if low > 0 or high < 0 else "includes 0"
            assert [f"{pair['first']} − {pair['second']}", difference(pair), sure] in rows
        critical = [
            "none" if share is None else f"{100 * share:.1f}"
            for share in group["critical_footprint"].values()
        ]
        if group["samples"] >= 20:
            assert any(found[1:] == critical for found in rows)


def difference(told):
    values = [told["difference"], *told["difference_interval"]]
    value, low, high = (
        "0.0" if float(f"{100 * value:.1f}") == 0 else f"{100 * value:+.1f}" for value in values
    )
    return f"{value} ({low} to {high})"


def test_pairs_whose_interval_excludes_0_are_marked(page):
    marked = re.findall(r'<tr class="clear">(.*?)</tr>', page)
    assert marked
    assert len(marked) == page.count("excludes 0</td>")
    assert all("excludes 0" in row for row in marked)


def test_a_page_stands_alone_and_is_well_formed(page):
    reader = Reader(page)
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "a", "form"}
    assert not re.search(r"https?:|@import|url\((?!#)", page)
    for tag, attributes in reader.tags:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#"), tag
    assert len(reader.ids) == len(set(reader.ids))
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
    assert used
    assert {one or other for one, other in used} <= set(reader.ids)
    first = reader.tags[0]
    assert first == ("html", {"lang": "en"})
    assert "<title>Evaluation of tiny-chat: 40 samples</title>" in page
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        reader.tags
    )
    drawn = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(drawn) == 4  # all, two tasks, needles
    assert all(one["role"] == "img" and one["aria-label"] for one in drawn)
    assert all(a["scope"] in ("col", "row") for tag, a in reader.tags if tag == "th")
    tables = [tag for tag, _ in reader.tags if tag in ("table", "caption")]
    assert tables == ["table", "caption"] * (len(tables) // 2)


HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</div></article></body><!-- ",
    "lone \ud800 and \udfff, \x00\x1b[31m\x85",
    "$\\frac{a}$ --> &lt; ]]>",
    "\N{CJK UNIFIED IDEOGRAPH-4F60}\N{RIGHT-TO-LEFT OVERRIDE}",
    "x" * 20_000,
    "",
    " \n ",
]


def hostile_lines(text):
    lines = copy.deepcopy(make_lines(ARMS, ("find", "trace"), (2048,), 2))
    for line in lines:
        if line["task"] == "find":
            line["task"] = text or "find"
        line["question"] = text
        line["answers"] = [text, text]
        line["facts"]["kind"] = text
        line["arms"]["full"].update(text=text, score=1.0)
        line["arms"]["snapkv 64"].update(text=text, score=0.0)
    return lines


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_shown_as_they_are(text, tmp_path):
    lines = hostile_lines(text)
    asked = {"model": f"models/{text}m", "settings": {text: text}}
    write_run(tmp_path / "run", lines, ARMS, **asked)
    page = page_of(tmp_path / "run")
    page.encode()
    reader = Reader(page)
    assert not {"script", "img", "image"} & {tag for tag, _ in reader.tags}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    if not text.strip():
        blank = ", 3 white-space characters" if text else ""
        assert reader.said.count(f"(empty{blank})") >= 4 * len(lines)
    elif len(text) > html.LONGEST:
        assert "… 17,000 more characters" in reader.said
    else:
        shown = re.sub("[\ud800-\udfff\x85]", "\ufffd", text)
        shown = shown.replace("\x00", "␀").replace("\x1b", "␛")
        assert reader.said.count(shown) > 4 * len(lines)
    for picture in make_pictures(read_sections([tmp_path / "run"]))[0]:
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,70}", picture.name)


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_is_read_back_from_what_is_escaped(text):
    class Words(HTMLParser):
        found = ""

        def handle_data(self, data):
            self.found += data

    reader = Words()
    reader.feed(f"<p>{html.text(text)}</p>")
    reader.close()
    html.text(text).encode()
    assert len(reader.found) == len(text)
    kept = [(a, b) for a, b in zip(text, reader.found, strict=True) if a != b]
    assert all(b == "\ufffd" or ord(b) == 0x2400 + ord(a) for a, b in kept)


def test_the_same_run_gives_the_same_bytes_in_one_folder_or_in_shards(lines, page, tmp_path):
    for number in (2, 1, 3):
        mine = lines[number - 1 :: 3]
        write_run(tmp_path / "one", mine, ARMS, f"-{number}-of-3", samples=len(lines))
        write_run(tmp_path / f"{number}", mine, ARMS, f"-{number}-of-3", samples=len(lines))
    assert list(read_lines(tmp_path / "one")) == lines
    assert page_of(tmp_path / "one") == page
    assert page_of(*(tmp_path / f"{number}" for number in (3, 1, 2))) == page


def test_samples_answered_twice_count_once(lines, tmp_path):
    write_run(tmp_path / "a", lines[:25], ARMS, samples=len(lines), machine="one")
    again = copy.deepcopy(lines[:30])
    for line in again[:25]:
        line["arms"]["full"].update(text="another answer", score=0.0)
    write_run(tmp_path / "b", again, ARMS, samples=len(lines), machine="another")
    (section,) = read_sections([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert section.lines == lines[:30]
    assert section.repeated == 25
    assert section.summary == summarise(lines[:30], ARMS)
    assert len(section.circumstances) == 2
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert "<title>Evaluation of tiny-chat: partial: 30 of 40 samples</title>" in page
    assert "25 further answers" in page
    assert "one</td>" in page
    assert "another</td>" in page


def test_query_aware_and_query_agnostic_stand_side_by_side(lines, tmp_path):
    write_run(tmp_path / "agnostic", lines[:7], ARMS, agnostic=True, samples=len(lines))
    write_run(tmp_path / "aware", lines, ARMS)
    sections = read_sections([tmp_path / "agnostic", tmp_path / "aware"])
    assert [(one.asked["agnostic"], len(one.lines)) for one in sections] == [(False, 40), (True, 7)]
    page = page_of(tmp_path / "agnostic", tmp_path / "aware")
    assert re.findall("<h2>(.*?):", page) == ["Query-aware", "Query-agnostic"]
    assert "query-aware 40 samples; query-agnostic partial: 7 of 40 samples</title>" in page
    Reader(page)


def test_other_runs_are_refused_in_a_sentence(lines, tmp_path):
    write_run(tmp_path / "run", lines, ARMS)
    for changes, told in (
        ({"model": "other"}, "model"),
        ({"content": "4567", "dtype": "float32"}, "content, dtype"),
        ({"agnostic": True, "limit": 4096}, "limit"),
        ({"arms": {name: ARMS[name] for name in ("full", "snapkv 64")}}, "arms"),
    ):
        arms = changes.pop("arms", ARMS)
        write_run(tmp_path / "other", lines, arms, **changes)
        with pytest.raises(EvaluationError, match=f"than .*run': it differs in {told}; make a"):
            read_sections([tmp_path / "run", tmp_path / "other"])


def test_folders_without_a_usable_run_are_refused_in_a_sentence(lines, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(EvaluationError, match=r"there is no run in .* no run\.json"):
        read_sections([folder])
    write_run(folder, [], ARMS)
    with pytest.raises(EvaluationError, match="none of the samples .* is done yet"):
        read_sections([folder])
    (folder / "samples.jsonl").write_text('{"task": 1}\n')
    with pytest.raises(EvaluationError, match="cannot be used: it lacks 'arms'"):
        read_sections([folder])
    (folder / "samples.jsonl").write_text("[1]\n")
    with pytest.raises(EvaluationError, match=r"line 1 of .* holds a JSON list"):
        read_sections([folder])
    (folder / "samples.jsonl").write_text(json.dumps(lines[0]) + "\n{\n")
    with pytest.raises(EvaluationError, match=r"line 2 of .* is not JSON"):
        read_sections([folder])
    broken = copy.deepcopy(lines[0])
    broken["arms"]["full"]["score"] = "high"
    (folder / "samples.jsonl").write_text(json.dumps(broken) + "\n")
    with pytest.raises(EvaluationError, match="its figures are none"):
        read_sections([folder])
    (folder / "samples.jsonl").unlink()
    with pytest.raises(EvaluationError, match=r"no samples\.jsonl"):
        read_sections([folder])
    (folder / "run.json").write_text('{"asked": {"model": "m"}}')
    with pytest.raises(EvaluationError, match="does not say its arms"):
        read_sections([folder])


def test_the_worst_losses_are_each_samples_largest(lines, tmp_path):
    lines = copy.deepcopy(lines)
    for line in lines:
        for told in line["arms"].values():
            told["score"] = 0.5
    for place, (arm, score) in enumerate((("snapkv 128", 0.1), ("pyramidkv 64", 0.2))):
        lines[place]["arms"][arm]["score"] = score
    lines[2]["arms"]["snapkv 64"]["score"] = lines[2]["arms"]["pyramidkv 128"]["score"] = 0.2
    lines[3]["arms"]["snapkv 64"]["score"] = 0.9  # a gain
    write_run(tmp_path / "run", lines, ARMS)
    (section,) = read_sections([tmp_path / "run"])
    losses = worst_losses(section)
    assert [(loss.line, loss.arm) for loss in losses] == [
        (lines[0], "snapkv 128"),
        (lines[2], "pyramidkv 128"),
        (lines[1], "pyramidkv 64"),
    ]
    assert [loss.amount for loss in losses] == pytest.approx([0.4, 0.3, 0.3])
    assert len(worst_losses(section, 2)) == 2
    for line in lines:
        line["arms"]["pyramidkv 64"]["score"] = 0.0
    write_run(tmp_path / "all", lines, ARMS)
    (section,) = read_sections([tmp_path / "all"])
    losses = worst_losses(section)
    assert [loss.line["task"] for loss in losses] == ["find", "trace"] * 5  # in turn


def test_needles_are_the_means_of_their_cells(lines, tmp_path):
    means = needle_means(lines, ARMS)
    assert list(means) == list(ARMS)
    for arm, cells in means.items():
        assert len(cells) == 10
        for (depth, length), mean in cells.items():
            scores = [
                line["arms"][arm]["score"]
                for line in lines
                if (line["facts"]["depth"], line["facts"]["length"]) == (depth, length)
            ]
            assert len(scores) == 4
            assert mean == pytest.approx(sum(scores) / 4)
    plain = [{**line, "facts": {}} for line in lines[:10]]
    for index, line in enumerate(plain):
        line["index"] = index
    assert needle_means(plain, ARMS) == {}
    write_run(tmp_path / "run", plain, ARMS)
    page = page_of(tmp_path / "run")
    assert "Needles by depth" not in page
    assert page.count("<svg") == 1  # one task: its picture would be that of all


def test_a_picture_has_the_points_of_its_group(lines, tmp_path):
    write_run(tmp_path / "run", lines, ARMS)
    (section,) = read_sections([tmp_path / "run"])
    figure = make_pictures([section])[0][0].figure
    (axes,) = figure.axes
    assert axes.get_xlabel() == "KV memory kept (% of the full cache's)"
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "full",
        "snapkv",
        "pyramidkv",
    ]
    told = section.summary["all"]["arms"]
    for bars, names in zip(axes.containers, series(ARMS).values(), strict=True):
        x, y = bars.lines[0].get_data()
        assert list(y) == pytest.approx([100 * told[name]["score"] for name in names])
        assert list(x) == pytest.approx([100 * told[name]["footprint"] for name in names], rel=0.02)
        for segment, name in zip(bars.lines[2][0].get_segments(), names, strict=True):
            shown = [point[1] for point in segment]
            assert shown == pytest.approx([100 * bound for bound in told[name]["interval"]])


@pytest.mark.parametrize("chosen", [("full",), ("snapkv 64", "pyramidkv 64"), ("snapkv 64",)])
def test_runs_of_few_arms_have_a_page(chosen, lines, tmp_path):
    arms = {name: ARMS[name] for name in chosen}
    few = [{**line, "arms": {name: line["arms"][name] for name in chosen}} for line in lines[:1]]
    write_run(tmp_path / "run", few, arms, model="")
    page = page_of(tmp_path / "run")
    Reader(page)
    assert "No sample was answered better" in page
    assert "<title>Evaluation of a model without a name: 1 sample</title>" in page


def test_the_command_writes_a_page_and_its_pictures(lines, page, tmp_path):
    write_run(tmp_path / "run", lines, ARMS)
    output, pictures = tmp_path / "page.html", tmp_path / "pictures"
    arguments = ["report", str(tmp_path / "run"), "--output", str(output)]
    done = CliRunner().invoke(app, [*arguments, "--pictures", str(pictures)])
    assert done.exit_code == 0, done.output
    assert output.read_text(encoding="utf-8") == page
    stems = ("needles", "scores-all", "scores-find", "scores-trace")
    assert sorted(path.name for path in pictures.iterdir()) == [
        f"{stem}.{form}" for stem in stems for form in ("png", "svg")
    ]
    before = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert CliRunner().invoke(app, [*arguments, "--pictures", str(pictures)]).exit_code == 0
    assert {path.name: path.read_bytes() for path in pictures.iterdir()} == before


def test_the_command_refuses_before_it_writes(lines, tmp_path):
    folder = tmp_path / "run"
    write_run(folder, lines, ARMS)
    before = (folder / "samples.jsonl").read_bytes()
    (tmp_path / "file").write_text("")
    for extra, told in (
        (["--output", folder / "samples.jsonl"], "is the file that is read"),
        (["--output", tmp_path / "none" / "page.html"], "has no folder"),
        (["--output", tmp_path / "a.html", "--pictures", tmp_path / "file"], "is no folder"),
        (["--output", tmp_path / "a.html", "--pictures", tmp_path / "x" / "y"], "has no folder"),
        ([tmp_path / "missing", "--output", tmp_path / "a.html"], "there is no run"),
        (["--output", tmp_path / "scores-all.svg", "--pictures", tmp_path], "are both"),
    ):
        done = CliRunner().invoke(app, ["report", str(folder), *map(str, extra)])
        assert isinstance(done.exception, PyramidKVError), told
        assert told in str(done.exception)
    assert (folder / "samples.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_report_needs_no_torch(lines, tmp_path):
    write_run(tmp_path / "run", lines[:4], ARMS)
    code = (
        "import sys\n"
        f"sys.argv = ['pyramidkv', 'report', {str(tmp_path / 'run')!r}, "
        f"'--output', {str(tmp_path / 'page.html')!r}]\n"
        "import atexit\n"
        "atexit.register(lambda: print({'torch', 'transformers'} & set(sys.modules)))\n"
        "from pyramidkv.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("set()\n")
    assert (tmp_path / "page.html").exists()


def test_without_matplotlib_it_says_what_to_install(lines, tmp_path, monkeypatch):
    write_run(tmp_path / "run", lines[:4], ARMS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--output", str(output)])
    assert "matplotlib" in str(done.exception)
    assert isinstance(done.exception, PyramidKVError)
    assert not output.exists()


@pytest.mark.parametrize("lengths", [(2048,), (2048, 4096, 8192)])
def test_titles_of_neighbouring_heat_maps_do_not_overlap(lengths):
    arms = ["streamingllm 512", "pyramidkv-official 512", "snapkv (entropy) 512"]
    cells = {(depth, length): 0.5 for depth in (0, 50, 100) for length in lengths}
    figure = draw_needles(
        dict.fromkeys(["full", *arms], cells),
        {arm: [arm] for arm in arms},
        dict.fromkeys(arms, "512"),
    )
    figure.draw_without_rendering()
    titles = [axes.title.get_window_extent() for axes in figure.axes[:4]]
    assert all(left.x1 < right.x0 for left, right in pairwise(titles))
    assert titles[-1].x1 < figure.axes[-1].get_tightbbox().x0  # the colour bar
