"""The report on made-up results."""

import base64
import dataclasses
import html
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, strategies as st

from benchmarks import _page, report
from benchmarks._options import Refusal
from benchmarks._results import write_csv
from benchmarks.against import compare
from benchmarks.verdicts import CONFIRMED, NOT_TESTED, REFUTED, UNDECIDED, Verdict


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
    "RU5ErkJggg=="
)
NAMES = ["k-sweep", "batch", "filters", "resnet"]


def verdict(claim, outcome, estimate=0.5, low=0.25, high=0.75):
    p = 0.001 if outcome in (CONFIRMED, REFUTED) else 0.5
    reason = "a direction"
    return Verdict(
        claim, "a number", "> 0", reason, estimate, low, high, 5, 0, p, outcome
    )


VERDICTS = [
    verdict("it holds", CONFIRMED),
    verdict("it fails", REFUTED, -0.5, -0.75, -0.25),
    verdict("who knows", UNDECIDED, low=-float("inf"), high=float("inf")),
]


def leave(results, name, verdicts=VERDICTS, **changes):
    """Write the files that an experiment leaves behind."""
    folder = results / name
    folder.mkdir(parents=True)
    stem = name.replace("-", "_")
    content = {
        "experiment": name,
        "scale": "embedded",
        "settings": {"seeds": 5, "periods": [1.0, 1e6], "limit": None, "deep": True},
        "finished": True,
        "paper": "All is well.",
        "figures": {stem: f"Everything about {name}."},
        "num_runs": 1200,
        "run_seconds": 61.4,
        "borrowed": False,
        "command": f"python -m benchmarks {name}",
        "date": "2026-01-02T03:04:05+00:00",
        "platform": "an abacus",
        "processors": 2,
        "backend": "cpu",
        "device": "cpu",
        "x64": True,
        "versions": {"jax": "1.2.3"},
    }
    content |= changes
    (folder / "settings.json").write_text(json.dumps(content))
    for figure in content["figures"]:
        (folder / f"{figure}.png").write_bytes(PNG)
    write_csv(folder / "verdicts.csv", verdicts)
    return folder


def written(results, names=NAMES):
    report.write(results, names)
    return tuple((results / f"report.{kind}").read_text() for kind in ("md", "html"))


def section(markdown, name):
    return re.split(r"^## ", markdown.partition(f"\n## {name}\n")[2], flags=re.M)[0]


class Reader(HTMLParser):
    """Parse HTML: check that tags are closed in order, and collect what they refer to."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.ids, self.links, self.sources = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        for key, value in attrs:
            named = {"id": self.ids, "href": self.links, "src": self.sources}
            named.get(key, []).append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_all_that_was_found_is_in_both_pages(tmp_path, capsys):
    leave(tmp_path, "k-sweep")
    markdown, page = written(tmp_path, ["k-sweep"])
    text = " ".join(read(page).text)
    for words in (
        "Test accuracy over K",
        "All is well.",
        "Everything about k-sweep.",
        "1,200",
        "1 min 1 s",
        "2026-01-02",
        "an abacus",
        "jax 1.2.3",
        "python -m benchmarks k-sweep",
        "1 of 1 experiments",
        "1 confirmed, 1 refuted, 1 undecided",
        "0.25 to 0.75",
        "1, 1e+06",
    ):
        assert words in markdown, words
        assert words in text, words
    for each, outcome in zip(
        VERDICTS, ("confirmed", "refuted", "undecided"), strict=True
    ):
        assert f"**{outcome}**: {each.claim}" in markdown
        assert f'<span class="outcome {outcome}">{outcome}</span>: {each.claim}' in page
    assert "report.html" in capsys.readouterr().out


def test_a_seed_alone_has_no_interval(tmp_path):
    leave(tmp_path, "k-sweep")
    (row,) = (
        line for line in written(tmp_path)[0].splitlines() if "| who knows |" in line
    )
    assert "| none | 5 | 0.5 | ≥ 0.06 | **undecided** | **undecided** |" in row


def test_figures_are_linked_in_one_page_and_held_in_the_other(tmp_path):
    leave(tmp_path, "k-sweep", figures={"k_sweep": "", "filters": ""})
    leave(tmp_path, "filters")
    markdown, page = written(tmp_path)
    linked = re.findall(r"\]\((report/.*?)\)", markdown)
    assert linked == [
        "report/k_sweep.png",
        "report/k_sweep_filters.png",
        "report/filters.png",
    ]
    assert all((tmp_path / name).read_bytes() == PNG for name in linked)
    sources = read(page).sources
    assert len(sources) == 3
    assert all(base64.b64decode(source.partition(",")[2]) == PNG for source in sources)


def test_a_missing_figure_is_named(tmp_path):
    folder = leave(tmp_path, "k-sweep")
    (folder / "k_sweep.png").unlink()
    markdown, _ = written(tmp_path)
    assert "figure k\\_sweep.png is missing" in markdown


def test_the_page_is_self_contained_and_its_links_resolve(tmp_path):
    leave(tmp_path, "k-sweep")
    markdown, page = written(tmp_path)
    reader = read(page)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(source.startswith("data:") for source in reader.sources)
    assert not re.search(r"https?://|@import|url\(|<script", page)
    headings = re.findall(r"^## (.*)$", markdown, re.M)
    assert set(re.findall(r"\]\(#(.*?)\)", markdown)) <= set(headings)


@pytest.mark.parametrize("state", ["missing", "unfinished", "{", "[]", "{}", "other"])
def test_experiments_without_results_are_named_with_their_command(state, tmp_path):
    leave(tmp_path, "k-sweep")
    folder = tmp_path / "batch"
    if state == "unfinished":
        command = "python -m benchmarks all --scale full --resume --out x --data-dir y"
        leave(tmp_path, "batch", finished=False, command=command)
    elif state == "other":
        leave(tmp_path, "batch", experiment="k-sweep")
    elif state != "missing":
        folder.mkdir()
        (folder / "settings.json").write_text(state)
    markdown, _ = written(tmp_path)
    known = {"missing": "not run", "unfinished": "unfinished"}
    word = known.get(state, "unreadable")
    assert f"| [batch](#batch) | {word} |" in markdown
    options = " --scale full --data-dir DIR" if state == "unfinished" else ""
    resume = " --resume" if state == "unfinished" else ""
    command = f"python -m benchmarks batch{options} --out {folder}{resume}"
    said = section(markdown, "batch")
    assert f"`{command}`" in said
    assert word.capitalize() in said
    assert "1 of 4 experiments have results" in markdown


@pytest.mark.parametrize("damage", ["no file", "no outcome", "no number", "no column"])
def test_damaged_verdicts_are_not_reported(damage, tmp_path):
    leave(tmp_path, "k-sweep")
    path = leave(tmp_path, "batch") / "verdicts.csv"
    text = path.read_text()
    path.write_text(
        {
            "no file": "",
            "no outcome": text.replace("refuted", "refutd"),
            "no number": text.replace("0.25", "a quarter"),
            "no column": text.replace("condition", "conditio"),
        }[damage]
    )
    if damage == "no file":
        path.unlink()
    markdown, _ = written(tmp_path)
    assert "Unreadable" in section(markdown, "batch")
    assert "Unreadable" not in section(markdown, "k-sweep")


def test_borrowed_runs_are_counted_once(tmp_path):
    leave(tmp_path, "k-sweep", run_seconds=3600.0, num_runs=30)
    leave(tmp_path, "batch", run_seconds=1800.0, num_runs=7)
    leave(tmp_path, "filters", run_seconds=3600.0, num_runs=30, borrowed=True)
    leave(tmp_path, "resnet", run_seconds=99.0, finished=False)
    markdown, page = written(tmp_path)
    for text in (markdown, page):
        assert "The 37 runs took 1 h 30 min in total." in text
    assert "reused from another experiment" in section(markdown, "filters")
    assert "3 confirmed, 3 refuted, 3 undecided" in markdown


def test_other_scales_and_versions_are_said(tmp_path):
    leave(tmp_path, "k-sweep")
    leave(tmp_path, "batch", scale="full")
    leave(tmp_path, "filters", versions={"jax": "3.2.1"}, device="a GPU")
    markdown, _ = written(tmp_path)
    assert "not all at the same scale: 2 at 'embedded', 1 at 'full'" in markdown
    assert "Scale 'full'" in section(markdown, "batch")
    assert "otherwise" not in section(markdown, "batch")
    said = section(markdown, "filters")
    assert re.search("Different from k-sweep: device a GPU.*, jax 3.2.1.", said)


def test_an_experiment_without_claims_says_so(tmp_path):
    leave(tmp_path, "k-sweep", verdicts=[])
    assert "This experiment judges no claim." in section(written(tmp_path)[0], "k-sweep")


def test_results_without_what_the_paper_found(tmp_path):
    leave(tmp_path, "k-sweep", paper="")
    assert "Background:" not in written(tmp_path)[0]


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_folder_is_refused_and_left_alone(exists, tmp_path):
    folder = tmp_path / "results"
    if exists:
        folder.mkdir()
    why = "has no results" if exists else "does not exist"
    with pytest.raises(Refusal, match=why) as refusal:
        report.write(folder, NAMES)
    assert str(folder) in str(refusal.value)
    assert folder.exists() == exists
    assert not exists or not list(folder.iterdir())


def test_folders_that_do_not_bear_the_name_of_an_experiment_are_named(tmp_path):
    for name in ("batch-reg", "k-sweep-reg"):
        leave(tmp_path, "k-sweep").rename(tmp_path / name)
    (tmp_path / "notes").mkdir()
    with pytest.raises(Refusal, match="must bear the name of its experiment") as refusal:
        report.write(tmp_path, NAMES)
    assert "holds 'batch-reg', 'k-sweep-reg'" in str(refusal.value)
    assert "notes" not in str(refusal.value)


def test_the_same_results_give_the_same_pages(tmp_path):
    leave(tmp_path, "k-sweep")
    assert written(tmp_path) == written(tmp_path)


NASTY = 'a | b <i>&amp;</i> `c` *d* _e_ [f](g) $h$ "i" {: #j } \\ ~~k~~ ## l'


def test_reports_are_compared_by_claim(tmp_path, capsys):
    then, now = tmp_path / "then", tmp_path / "now"
    leave(then, "k-sweep")
    changed = [
        verdict("it holds", REFUTED, 0.4, 0.3, 0.5),
        verdict("it fails", REFUTED, 3.0, 2.0, 4.0),
        verdict("who knows", UNDECIDED),
        verdict("a new one", CONFIRMED),
    ]
    leave(now, "k-sweep", changed)
    report.write(then, NAMES)
    report.write(now, NAMES)
    capsys.readouterr()
    compare(now, then / "report.json")
    assert capsys.readouterr().out.splitlines() == [
        "k-sweep: it holds",
        "    confirmed, 0.5 [0.25, 0.75] -> refuted, 0.4 [0.3, 0.5]",
        "k-sweep: it fails",
        "    refuted, -0.5 [-0.75, -0.25] -> refuted, 3 [2, 4]",
        "k-sweep: a new one",
        "    missing -> confirmed, 0.5 [0.25, 0.75]",
        "1 verdicts agree and have overlapping intervals; 3 differ; 0 are in the other "
        "report only.",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"k-sweep": {"it holds": {}}}', "{"])
def test_files_that_are_not_reports_are_not_compared(text, tmp_path):
    leave(tmp_path, "k-sweep")
    report.write(tmp_path, NAMES)
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(Refusal, match="is not a report in JSON"):
        compare(tmp_path, path)


def test_outcomes_with_and_without_holm(tmp_path):
    weak = [dataclasses.replace(verdict(f"claim {i}", CONFIRMED), p=0.04) for i in "abc"]
    clear = dataclasses.replace(verdict("clear", CONFIRMED), p=1e-9)
    untold = dataclasses.replace(verdict("at a ceiling", NOT_TESTED), p=1.0)
    leave(tmp_path, "k-sweep", [*weak, clear])
    leave(tmp_path, "batch", [untold])
    markdown, _ = written(tmp_path)
    told = "They judge 5 claims: 4 confirmed, 0 refuted, 0 undecided, 1 untested."
    assert told in markdown
    after = "over all claims: 1 confirmed, 0 refuted, 3 undecided, 1 untested"
    assert after in markdown
    assert "**confirmed** (undecided after Holm): claim a" in markdown
    assert "**confirmed**: clear" in markdown
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["k-sweep"]["claim a"]["after_holm"] == "undecided"
    assert found["k-sweep"]["clear"]["after_holm"] == "confirmed"


def test_text_is_text(tmp_path):
    leave(
        tmp_path,
        "k-sweep",
        [verdict(NASTY, CONFIRMED)],
        figures={"k_sweep": NASTY},
        paper=NASTY,
        settings={"text": NASTY, "lines": "one\ntwo"},
    )
    markdown, page = written(tmp_path)
    assert " ".join(read(page).text).count(NASTY) == 5
    bare = r"(?<!\\)(\| b|`c|\*d|_e|\[f\]\(g)|<i>|\$h|~k"
    assert not re.search(bare, markdown)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if "a \\| b" in row}
    assert widths == {6, 11}


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"])))
def test_escaped_text_is_read_back(text):
    """Undo the escapes as both dialects of Markdown do: remove backslashes before
    punctuation, and decode entities."""
    escaped = _page._escaped(text)
    assert html.unescape(re.sub(r"\\([\\`*_{}\[\]|#])", r"\1", escaped)) == text
    bare = re.sub(r"\\[\\`*_{}\[\]|#]", "", escaped)
    assert not re.search(r"[\\`*_{}\[\]|<>$~]|(?<!&)#", bare)


@pytest.mark.parametrize("start", ["- ", "+ ", "1. ", "12) "])
def test_a_paragraph_is_not_a_list(start):
    text = _page.markdown([_page.Paragraph([f"{start}one"])])
    assert text == f"{start[:-2]}\\{start[-2]} one\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (5400, "1 h 30 min"),
        (359_990, "100 h 0 min"),
    ],
)
def test_durations(seconds, shown):
    assert report._duration(seconds) == shown
