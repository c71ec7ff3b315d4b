"""The HTML page of runs: what is read, what is shown, and that nothing in a log can do harm."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from example_logs import write_log
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import bilevel
from bilevel.__main__ import main
from bilevel.events import Log
from bilevel.events import read as read_record
from bilevel.plotting.palette import COLORS, OTHERS
from bilevel.report import page, read, writing
from bilevel.report.colors import DARK, LIGHT, contrast, readable
from bilevel.report.numbers import Axis, axis_of
from bilevel.report.runs import from_log, tuned_of
from bilevel.report.thinning import thin, thin_band

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checked(HTMLParser):
    """Reads a page; every tag must be closed in its order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def checked(text):
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    parser.words = " ".join(" ".join(parser.text).split())
    return parser


def test_a_log_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path / "pipe.jsonl", tmp_path):
        with pytest.raises(ValueError, match="is not a file: give an event log"):
            bilevel.events.read(place)


def test_a_finished_run(tmp_path):
    log = write_log(tmp_path / "run.pt.jsonl", resume=90, warnings=("the disk is full",))
    out = bilevel.report.write(log, tmp_path / "page.html")
    seen = checked(out.read_text(encoding="utf-8"))
    (run,) = read([log])
    best = run.best_round
    for words in (
        "ended: steps",
        "delta_stn",
        f"at round {best:g}",
        "Signal to noise",
        "the disk is full",
        "went on from a checkpoint",
        "norm of the hypergradient",
        "response_norm",
        "memory",
        "time per round",
        "checkpoints",
        "inner_steps",
        "torch",
    ):
        assert words in seen.words, words
    assert "data-refresh" not in out.read_text(encoding="utf-8").split("<main>")[0]
    assert seen.tags.count("title") >= 1 and "rect" in seen.tags


def test_nothing_comes_from_elsewhere(tmp_path):
    text = page(read([write_log(tmp_path / "run.jsonl")]))
    seen = checked(text)
    assert not {"link", "img", "iframe"} & set(seen.tags)
    assert not [value for _, key, value in seen.attributes if key == "src" or (key == "href" and value[0] != "#")]
    assert "://" not in text.replace("https://keepachangelog", "")


def test_rows_are_those_that_the_reader_of_logs_finds(tmp_path):
    """Rows that a resume has made void are left out, and of several runs in a file the last counts."""
    log = write_log(tmp_path / "run.jsonl", rounds=50)
    write_log(log, rounds=120, resume=90, seed=3, end=None)
    rows = read_record(log).rows
    (run,) = read([log])
    for column in rows[-1]:
        if column != "round":
            expected = [(row["round"], row[column]) for row in rows if column in row]
            np.testing.assert_array_equal(np.stack(run.get(column), 1), expected)
    assert run.running and run.last_round == 120


def test_names_and_messages_are_escaped(tmp_path):
    evil = '<script>alert("x")</script>'
    log = write_log(tmp_path / "run.jsonl", names=(evil, 'a"><img src=x onerror=alert(1)>'), warnings=(evil,))
    other = write_log(tmp_path / "b.jsonl", names=(evil,), method=evil, settings={evil: evil}, end=evil)
    for runs in ([log], [other], [log, other]):
        text = page(read(runs), title=evil)
        seen = checked(text)
        assert seen.tags.count("script") == 1 and "img" not in seen.tags
        assert evil in seen.words
        assert not [key for _, key, _ in seen.attributes if key.startswith("on")]


def test_what_is_no_unicode_is_replaced(tmp_path):
    """Names of files may hold such bytes."""
    log = write_log(tmp_path / "run.jsonl", rounds=3)
    start, _, rest = log.read_text().partition("\n")
    log.write_text(start.replace('"method": "', '"method": "\\udcff') + "\n" + rest)
    assert "\\udcff" in log.read_text()
    assert "?delta_stn" in bilevel.report.write([log], tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_run_that_goes_on(tmp_path):
    log = write_log(tmp_path / "run.jsonl", end=None)
    with log.open("a") as file:
        file.write('{"event": "round", "rou')  # being written
    (run,) = read([log])
    seen = checked(page([run], refresh=5, now=run.written + 7))
    assert "running, last written 7 s ago" in seen.words
    assert ("body", "data-refresh", "5") in seen.attributes and ("meta", "http-equiv", "refresh") in seen.attributes
    assert "perhaps ended" in checked(page([run], now=run.written + 90_000)).words


def test_a_watch_ends_with_the_run(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    path.touch()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        path.unlink()
        write_log(path, end=None if len(naps) < 3 else "steps")

    monkeypatch.setattr(writing.time, "sleep", nap)
    seen = []
    out = bilevel.report.write(path, watch=0.5, told=lambda page: seen.append(page.read_text(encoding="utf-8")))
    assert len(naps) == 3 and min(naps) >= 0.5
    assert "No round has been recorded yet" in seen[0]
    assert "data-refresh=0.5" in seen[1] and "data-refresh=" not in seen[-1]
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".html"] == [out.name]


def test_five_runs_compared(tmp_path):
    methods = ["delta_stn", "stn", "centered_stn", "implicit_cg", "unrolled"]
    logs = [
        write_log(tmp_path / f"{method}.pt.jsonl", method=method, seed=seed, settings={"rate": seed / 8, "same": 1})
        for seed, method in enumerate(methods)
    ]
    text = page(read(logs))
    seen = checked(text)
    assert "Settings that differ" in seen.words and "0.375" in seen.words
    differing = seen.words.split("Settings that differ")[1].split("Losses")[0]
    assert "rate" in differing and "same" not in differing
    assert all(f"{method} " in seen.words for method in methods)
    losses = [run.at("validation_loss", run.best_round) for run in read(logs)]
    assert f"<strong>{bilevel.report.numbers.number(min(losses))}</strong>" in text
    assert text.count("<strong>") == 1


def test_fifty_hyperparameters_and_many_rows(tmp_path):
    """Not all at once on the screen, each in the table, and a page below two megabytes."""
    names = tuple(f"h{index}" for index in range(50))
    log = write_log(tmp_path / "run.jsonl", rounds=1500, names=names, entries=20)
    text = page(read([log]))
    assert len(text.encode()) < 2_000_000
    seen = checked(text)
    assert "details" in seen.tags and all(name in seen.words for name in names)


def test_not_finite_values_are_shown(tmp_path):
    log = Log(tmp_path / "run.jsonl")
    log.write("start", {"method": "stn", "hyper": {"a": {"low": 0.0, "high": math.inf, "shape": []}}})
    for index, loss in enumerate([1.0, math.nan, 0.5, math.inf, 1e300], 1):
        log.write("round", {"round": index, "inner_loss": loss, "validation_loss": loss, "a": 10.0**-index})
    log.write("end", {"stopped": "diverged", "round": 5})
    log.flush()
    log.close()
    (run,) = read([log.path])
    text = page([run])
    assert run.best_round == 3
    assert 'class="lost"' in text and 'class="status bad"' in text
    checked(text)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is not a file"):
        read([tmp_path / "pipe.jsonl"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.csv").write_text("round,seconds,outer_loss\n1,1,0.5\n")
    for name in ("settings", "summary", "environment"):
        os.mkfifo(tmp_path / "run" / f"{name}.json")
    (run,) = read([tmp_path / "run"])
    assert not run.settings and not run.environment


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("hello\nworld\n", "not an event log"),
        ("[1]\n[2]\n", "not an event log"),
        ('{"a": 1}\n', "not an event log"),
        ("[" * 100_000 + "\n", "not an event log"),
    ],
    ids=["empty", "text", "lists", "foreign", "deep"],
)
def test_other_files_are_refused_by_name(tmp_path, content, message, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        bilevel.report.write(path)
    with pytest.raises(SystemExit, match=r"^error: .*run\.jsonl"):
        main(["report", str(path)])
    assert not (tmp_path / "report.html").exists()


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        bilevel.report.write(tmp_path / "run.jsonl")
    with pytest.raises(FileNotFoundError, match="has no run"):
        bilevel.report.write(tmp_path)
    with pytest.raises(ValueError, match="runs is empty"):
        bilevel.report.write([])


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["start", "round", "resume", "checkpoint", "warning", "end", "other"])
KEYS = st.sampled_from(
    "round seconds inner_loss outer_loss validation_loss a a[0] a.mean signal.a memory "
    "hyper settings environment message stopped bytes time method".split()
)


@given(
    st.lists(st.builds(lambda kind, rest: rest | {"event": kind}, KINDS, st.dictionaries(KEYS, HOSTILE)), max_size=8)
)
def test_any_events_make_a_page(events):
    run = from_log(events, written=0.0)
    checked(page([run]))
    checked(page([run, dataclasses.replace(run, name="other")]))


finite = st.floats(-1e6, 1e6)
lines = st.integers(0, 400).flatmap(
    lambda size: st.tuples(
        arrays.arrays(np.float64, size, elements=st.floats(0, 1e4)).map(np.sort),
        arrays.arrays(np.float64, size, elements=finite | st.just(math.nan) | st.just(math.inf)),
    )
)


@given(lines, st.integers(1, 30))
def test_thinning_keeps_what_stands_out(line, buckets):
    x, y = line
    kept = thin(x, y, buckets)
    good = np.flatnonzero(np.isfinite(y))
    assert len(kept) <= max(4 * buckets, 0) and (np.diff(kept) > 0).all() and set(kept) <= set(good)
    if len(good):
        assert kept[0] == good[0] and kept[-1] == good[-1]
        assert y[kept].min() == y[good].min() and y[kept].max() == y[good].max()
    if len(good) <= 4 * buckets:
        np.testing.assert_array_equal(kept, good)


@given(lines, st.integers(1, 30))
def test_a_thinned_band_covers_the_same(line, buckets):
    x, y = line
    edges, low, high = thin_band(x, y - 1, y + 1, buckets)
    good = np.isfinite(y)
    assert len(edges) == len(low) == len(high) <= 2 * buckets
    if good.any():
        assert low.min() == (y - 1)[good].min() and high.max() == (y + 1)[good].max()
        for at, value in zip(x[good], y[good], strict=True):
            near = (edges[:-1] <= at) & (at <= edges[1:]) if len(edges) > 1 else np.array([True])
            near = np.concatenate([near, near[-1:]]) if len(edges) > 1 else near
            assert low[near].min() <= value <= high[near].max()


@given(st.floats(1e-12, 1e12), st.floats(1, 1e6), st.booleans())
def test_ticks_lie_on_the_axis(low, ratio, log):
    axis = axis_of(low, low * ratio, log=log)
    ticks = axis.ticks()
    assert ticks == sorted(ticks) and 1 <= len(ticks) <= 13
    assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick in ticks)
    assert 0 <= axis.place(low) <= axis.place(low * ratio) <= 1
    assert Axis(0, 1).place(0.25) == 0.25


@pytest.mark.parametrize("background", [LIGHT, DARK])
def test_every_colour_can_be_seen(background):
    for hue in {*COLORS.values(), *OTHERS, "#111111", "#ffffff", "#000000"}:
        assert contrast(readable(hue, background), background) >= 3


def test_hyperparameters_are_found_by_name():
    rows = [
        {"round": 1.0, "scale": 1.0, "a[0]": 1.0, "a[1]": 2.0, "b.mean": 0.0, "b.min": 0.0, "b.max": 0.0, "user": 3.0}
    ]
    described = {"scale": {"low": 0.0, "high": "Infinity"}, "a": {}, "b": {}}
    assert [tuned.columns for tuned in tuned_of(rows, described)] == [
        ("scale",),
        ("a[0]", "a[1]"),
        ("b.mean", "b.min", "b.max"),
    ]


def test_the_page_of_a_solution(tmp_path):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def outer(model, hyper, batch):
        return (batch @ model.params["w"] - 1).square().mean()

    def inner(model, hyper, batch):
        return outer(model, hyper, batch) + hyper["decay"] * bilevel.l2(model.params)

    problem = bilevel.Problem(
        {"w": torch.zeros(3)}, inner_loss=inner, outer_loss=outer, hyper={"decay": bilevel.positive(0.1)}
    )
    adam = lambda params: torch.optim.Adam(params, lr=0.1)  # noqa: E731
    options = {"inner_optimizer": adam, "outer_optimizer": adam, "progress": False, "seed": 0}
    solution = bilevel.solve(problem, [x], [x], method="implicit_exact", steps=12, **options)
    out = solution.report(tmp_path / "run.html")
    seen = checked(out.read_text(encoding="utf-8"))
    assert "decay" in seen.words and "ended: steps" in seen.words and "Implicit" in seen.words
    assert bilevel.report.numbers.number(float(solution.hyper["decay"])) in seen.words
    solution.history.to_csv(tmp_path / "history.csv")
    (tmp_path / "settings.json").write_text(json.dumps({"method": "implicit_exact", "settings": {"epochs": 3}}))
    (tmp_path / "summary.json").write_text("[" * 100_000)  # a page shows what it can
    seen = checked(page(read([tmp_path])))
    assert "epochs" in seen.words and "implicit_exact" in seen.words and "decay" in seen.words


def test_the_command(tmp_path):
    log = write_log(tmp_path / "deep" / "er" / "run.jsonl", rounds=20)
    command = [sys.executable, "-m", "bilevel", "report", str(tmp_path), "--out", str(tmp_path / "a.html")]
    done = subprocess.run([*command, "--title", "mine", "--watch", "1"], capture_output=True, text=True, check=True)
    assert "all runs have ended" in done.stdout and "<h1>mine</h1>" in (tmp_path / "a.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["report", str(log), "--watch", "-1"])
