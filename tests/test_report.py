"""The report: figures read off hand-made traces, pictures that hold what they should, a page also for a run that died."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_demo as demo
from report_demo import SUMMARY, WORKERS, make_memory, make_trace, write_run

from atoll.errors import AtollError, DocumentError
from atoll.report.analysis import (
    activation_counts,
    bubbles,
    by_step,
    kind_means_ns,
    link_use,
    messages,
    occupied,
    parse_name,
    shown_step,
    steady_step,
    step_lengths,
    window,
    worker_shares,
)
from atoll.report.compare import compare, error_percent
from atoll.report.curves import draw_links, draw_loss, draw_workers, smoothed
from atoll.report.page import write_report
from atoll.report.perfetto import export_perfetto, perfetto_events
from atoll.report.rows import MOST_LINK_ROWS, lay_out
from atoll.report.run import load_run
from atoll.report.style import content_of, kind_colour
from atoll.report.timeline import draw_timeline, panel
from atoll.trace.span import Span, Trace, TraceHeader


def span(worker: str, name: str, lane: str, start: int, end: int, *, index: int = 0, size: int = 0, step: int = 0) -> Span:
    return Span(worker=worker, step=step, instruction=index, name=name, lane=lane, start_ns=start, end_ns=end, size_bytes=size)


def two_workers() -> list[Span]:
    """a: F 0-10, B 60-70. b: F 30-40, B 40-50. The message there is sent at 10 and arrives at 30; back 50-60."""
    return [
        span("a", "0F0", "compute", 0, 10, index=0), span("a", "0SEND_F0", "out:b", 10, 25, index=1, size=100),
        span("b", "1RECV_F0", "in:a", 0, 30, index=0, size=100), span("b", "1F0", "compute", 30, 40, index=1),
        span("b", "1B0", "compute", 40, 50, index=2), span("b", "1SEND_B0", "out:a", 50, 55, index=3, size=7),
        span("a", "0RECV_B0", "in:b", 11, 60, index=2, size=7), span("a", "0B0", "compute", 60, 70, index=3),
    ]


def as_trace(spans: list[Span], clock: str = "simulated") -> Trace:
    workers = tuple(dict.fromkeys(one.worker for one in spans))
    return Trace(header=TraceHeader(program="p", clock=clock, workers=workers), spans=tuple(spans))


@pytest.mark.parametrize(("name", "kind", "stage", "microbatch"), [
    ("2F0", "F", 2, 0), ("13W12", "W", 13, 12), ("2SEND_F7", "SEND_F", 2, 7), ("5RECV_B1<2", "RECV_B", 5, 1),
    ("LOAD 3.4", "LOAD", 3, 4), ("SEND partial[3.1.a]", "SEND", None, None), ("UPDATE adamw 0.1", "UPDATE", None, None),
    ("COMMIT", "COMMIT", None, None),
])
def test_names_are_taken_apart(name: str, kind: str, stage: int | None, microbatch: int | None) -> None:
    parsed = parse_name(name)
    assert (parsed.kind, parsed.stage, parsed.microbatch) == (kind, stage, microbatch)


def test_what_a_message_carries_is_read_off_its_name() -> None:
    assert content_of(span("a", "0SEND_F0", "out:b", 0, 1)) == "activations"
    assert content_of(span("a", "1SEND_B0>4", "out:b", 0, 1)) == "activation gradients"
    assert content_of(span("a", "SEND reduced[0.1]", "out:b", 0, 1)) == "weight gradients"
    assert content_of(span("a", "SEND tally[lab_f]", "out:b", 0, 1)) == "votes"
    assert content_of(span("a", "SEND something", "out:b", 0, 1)) == "other"
    names = ("0F0", "0B0", "0I0", "0W0", "0R0", "UPDATE x 0")
    assert len({kind_colour(span("a", name, "compute", 0, 1)) for name in names}) == 6


def test_the_shares_of_a_step_are_those_worked_out_by_hand() -> None:
    a, b = worker_shares(two_workers(), ("a", "b"))
    # a stands still 10-60: the message to it is under way 50-60, before that it waits for b
    assert (a.compute_ns, a.exposed_ns, a.waiting_ns, a.idle_ns) == (20, 10, {"b": 40}, 0)
    # b stands still 0-30: under way 10-30, waiting for a 0-10; after 50 nothing is left to do
    assert (b.compute_ns, b.exposed_ns, b.waiting_ns, b.idle_ns) == (20, 20, {"a": 10}, 20)


def test_own_lanes_are_waited_for_by_name_and_shares_sum_to_the_step() -> None:
    spans = [span("a", "LOAD 0.0", "disk", 0, 8, index=0), span("a", "0F0", "compute", 8, 10, index=1),
             span("a", "ALL_REDUCE 0.0", "native", 10, 15, index=2), span("a", "UPDATE adamw 0", "compute", 16, 20, index=3)]
    share = worker_shares(spans, ("a",))[0]
    assert (share.compute_ns, share.exposed_ns, share.waiting_ns, share.idle_ns) == (6, 5, {"disk": 8, "native": 1}, 0)
    for one in worker_shares(demo.make_step(0, 0, noise=0.3), WORKERS):
        assert one.total_ns == window(demo.make_step(0, 0, noise=0.3)).length_ns
        assert min(one.compute_ns, one.exposed_ns, one.idle_ns, *one.waiting_ns.values()) >= 0


def test_whoever_comes_last_to_a_collective_is_waited_for() -> None:
    spans = [span("a", "0F0", "compute", 0, 10), span("a", "ALL_REDUCE 0.0", "native", 10, 50, index=1, size=64),
             span("a", "UPDATE adamw 0", "compute", 50, 60, index=2), span("b", "0F0", "compute", 0, 30),
             span("b", "ALL_REDUCE 0.0", "native", 30, 50, index=1, size=64),
             span("b", "UPDATE adamw 0", "compute", 50, 60, index=2)]
    a, b = worker_shares(spans, ("a", "b"))
    assert (a.exposed_ns, a.waiting_ns) == (20, {"b": 20})
    assert (b.exposed_ns, b.waiting_ns) == (20, {})
    assert link_use(spans) == {("a", ""): (1, 64, 20), ("b", ""): (1, 64, 20)}


def test_messages_meet_in_program_order_even_when_the_clocks_disagree() -> None:
    spans = [span("a", "x", "out:b", 9, 10, index=5), span("a", "y", "out:b", 0, 3, index=2),
             span("b", "x", "in:a", 5, 6, index=8), span("b", "y", "in:a", 7, 9, index=4),
             span("a", "z", "out:b", 11, 12, index=7)]
    found = [(m.send.name, m.receive.name if m.receive else None) for m in messages(spans)]
    assert found == [("y", "y"), ("x", "x"), ("z", None)]


def test_bubbles_are_the_two_of_the_field() -> None:
    # a is busy 20 of 70 and all of its own 0-70; b is busy 20 of 70 and all of its own 30-50
    makespan, own = bubbles(two_workers())
    assert makespan == pytest.approx(1 - 20 / 70)
    assert own == pytest.approx((1 - 20 / 70 + 0) / 2)


def test_one_f_one_b_keeps_as_many_microbatches_as_ranks_remain() -> None:
    counts = activation_counts(demo.make_step(0, 0))
    assert [max(value for _, value in counts[worker]) for worker in WORKERS] == [4, 3, 2, 1]
    assert all(curve[-1][1] == 0 for curve in counts.values())
    split = [span("a", "0F0", "compute", 0, 10), span("a", "0I0", "compute", 10, 20), span("a", "0W0", "compute", 30, 40)]
    assert activation_counts(split)["a"] == [(0, 1), (40, 0)]


def test_step_length_runs_from_the_end_of_the_step_before() -> None:
    spans = [span("a", "0F0", "compute", 0, 10), span("a", "0F0", "compute", 8, 25, step=1),
             span("a", "0F0", "compute", 40, 50, step=3)]
    assert step_lengths(by_step(as_trace(spans))) == {0: 10, 1: 15, 3: 10}


def test_the_shown_step_is_the_last_simulated_or_the_median_measured_one() -> None:
    lengths = [500, 90, 30, 10, 20, 40, 50, 60]
    spans, at = [], 0
    for step, length in enumerate(lengths):
        spans.append(span("a", "0F0", "compute", at, at + length, step=step))
        at += length
    steps = by_step(as_trace(spans))
    assert steady_step(steps) == 2
    assert shown_step(as_trace(spans), steps) == 7
    assert steady_step({}) is None


def test_kinds_links_and_occupancy() -> None:
    assert kind_means_ns(two_workers()) == {"F": (2, 10.0), "B": (2, 10.0)}
    assert link_use(two_workers()) == {("a", "b"): (1, 100, 15), ("b", "a"): (1, 7, 5)}
    assert occupied([(0, 10), (5, 10)], [0, 5, 10, 15]) == [1.0, 2.0, 0.0]


def test_a_link_is_busy_until_the_bytes_have_left_not_until_a_buffer_has_taken_them() -> None:
    """Latency 10 ms by the small message; the large one is taken at once and arrives 90 ms later, so it travelled for 80."""
    ms = 1_000_000
    spans = [span("a", "SEND vote", "out:b", 0, ms, size=8, index=0),
             span("b", "RECV vote", "in:a", 0, 11 * ms, size=8, index=0),
             span("a", "0SEND_F0>1", "out:b", 20 * ms, 22 * ms, size=1000, index=1),
             span("b", "1RECV_F0<0", "in:a", 11 * ms, 110 * ms, size=1000, index=1),
             span("a", "0SEND_F1>1", "out:b", 200 * ms, 203 * ms, size=1000, index=2),
             span("b", "1RECV_F1<0", "in:a", 400 * ms, 400 * ms, size=1000, index=2)]
    assert link_use(spans) == {("a", "b"): (3, 2008, (1 + 80 + 3) * ms)}


def test_comparison_gives_signed_errors_and_medians() -> None:
    fast = as_trace(two_workers())
    slow = as_trace([msgspec.structs.replace(one, start_ns=2 * one.start_ns, end_ns=2 * one.end_ns) for one in fast.spans],
                    "measured")
    found = compare(fast, slow)
    assert (found.step.predicted_ns, found.step.measured_ns, found.step.error_percent) == (70, 140, -50.0)
    assert {row.error_percent for row in found.workers} == {-50.0}
    assert [(row.predicted_bytes, row.measured_bytes) for row in found.lanes if row.lane == "out:b"] == [(100, 100)]
    assert found.twin.holds is True and found.twin.spans == 8
    assert error_percent(11, 10) == pytest.approx(10) and error_percent(None, 10) is None and error_percent(1, 0) is None


def test_the_twin_law_names_what_differs() -> None:
    predicted = make_trace("simulated", 2)
    measured = make_trace("measured", 3, noise=0.1)
    assert compare(predicted, measured).twin.holds is True
    spans = list(measured.spans)
    victim = next(i for i, one in enumerate(spans) if one.step == 1 and one.lane == "out:cat")
    spans[victim] = msgspec.structs.replace(spans[victim], size_bytes=spans[victim].size_bytes + 1)
    verdict = compare(predicted, msgspec.structs.replace(measured, spans=tuple(spans))).twin
    assert verdict.holds is False and len(verdict.differences) == 1
    assert "step 1: size_bytes" in verdict.differences[0] and "bee" in verdict.differences[0]
    lost = tuple(one for one in measured.spans if not (one.step == 0 and one.name == "2B3"))
    verdict = compare(predicted, msgspec.structs.replace(measured, spans=lost)).twin
    assert verdict.holds is False and "cat did not run 2B3" in verdict.differences[0]
    doubled = (*measured.spans, next(one for one in measured.spans if one.step == 0))
    assert "more than once" in compare(predicted, msgspec.structs.replace(measured, spans=doubled)).twin.differences[0]


def test_only_the_last_step_may_be_broken_off() -> None:
    predicted, measured = make_trace("simulated", 1), make_trace("measured", 3)
    cut = msgspec.structs.replace(measured, spans=measured.spans[:-20])
    verdict = compare(predicted, cut).twin
    assert (verdict.holds, verdict.steps, verdict.partial) == (True, 2, (2,))
    assert compare(predicted, None).twin.holds is None


def check_perfetto(document: dict[str, Any]) -> dict[str, int]:
    """What Perfetto demands: slices of a track nest, every flow has both ends inside slices, names for all tracks."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named: set[tuple[int, int]] = set()
    flows: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for event in document["traceEvents"]:
        key = (event["pid"], event.get("tid", 0))
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            tracks.setdefault(key, []).append((start, start + round(event["dur"] * 1000)))
        elif event["ph"] in "sf":
            flows.setdefault((event["ph"], event["id"]), []).append((*key, round(event["ts"] * 1000)))
        elif event["name"] == "thread_name":
            named.add(key)
    assert set(tracks) == named
    for slices in tracks.values():
        slices.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(slices))
    for (phase, number), places in flows.items():
        assert len(places) == 1 and ("f" if phase == "s" else "s", number) in flows
        pid, tid, at = places[0]
        assert any(low <= at <= high for low, high in tracks[pid, tid])
        if phase == "f":
            assert flows["s", number][0][2] <= at
    return {phase: sum(event["ph"] == phase for event in document["traceEvents"]) for phase in "XsfCM"}


def test_perfetto_export_nests_and_its_flows_match(tmp_path: Path) -> None:
    predicted, measured = make_trace("simulated", 1), make_trace("measured", 4, noise=0.2)
    kept = export_perfetto(tmp_path / "t.json", predicted, measured, step=2, memory=make_memory(predicted))
    document = json.loads((tmp_path / "t.json").read_text())
    counts = check_perfetto(document)
    assert kept == (0, 3)
    assert counts["X"] == len(predicted.spans) + len(measured.spans)
    assert counts["s"] == counts["f"] == sum(one.lane.startswith("out:") for one in (*predicted.spans, *measured.spans))
    assert counts["C"] == sum(map(len, make_memory(predicted).values()))
    groups = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert groups == {f"{group} · {worker}" for group in ("predicted", "measured") for worker in WORKERS}
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    begins = min(event["ts"] for event in slices if event["pid"] < 1000)
    assert begins == min(event["ts"] for event in slices if event["pid"] > 1000 and event["args"]["step"] == 2)


def test_overlapping_spans_of_a_lane_get_tracks_of_their_own(tmp_path: Path) -> None:
    spans = [span("a", "x", "out:b", 0, 100, index=0, size=1), span("a", "y", "out:b", 50, 150, index=1, size=1),
             span("b", "x", "in:a", 20, 120, index=0, size=1), span("b", "y", "in:a", 60, 170, index=1, size=1)]
    events = perfetto_events("g", spans)
    assert check_perfetto({"traceEvents": events})["X"] == 4
    assert {"out:b", "out:b (2)"} <= {event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_a_long_trace_is_cut_around_the_chosen_step(tmp_path: Path) -> None:
    measured = make_trace("measured", 9)
    each = len(measured.spans) // 9
    assert export_perfetto(tmp_path / "t.json", None, measured, step=4, most_spans=3 * each) == (3, 5)
    assert export_perfetto(tmp_path / "t.json", None, measured, step=0, most_spans=1) == (0, 0)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_rows_of_a_timeline_do_not_overlap() -> None:
    many = [f"n{i}" for i in range(64)]
    eight = {name: f"i{int(name[1:]) // 8}" for name in many}
    for workers, islands in ((list(WORKERS), demo.ISLANDS), (many, eight), (["a"], {})):
        layout = lay_out(demo.make_step(0, 0, workers, islands, 2), islands, True)
        rows = sorted(layout.rows, key=lambda row: row.top_in)
        assert all(one.top_in + one.height_in <= two.top_in + 1e-9 for one, two in pairwise(rows))
        assert rows[-1].top_in + rows[-1].height_in <= layout.height_in
        assert [row.worker for row in rows if row.kind == "compute"] == workers
        assert sum(row.kind in ("link", "flow") for row in rows) <= max(MOST_LINK_ROWS, 64)


def test_links_between_islands_come_first() -> None:
    rows = [row for row in lay_out(demo.make_step(0, 0), demo.ISLANDS, False).rows if row.kind == "link"]
    crossing = [bool(row.island) for row in rows]
    assert crossing == sorted(crossing, reverse=True) and sum(crossing) == 6
    assert "bee → cat" in [row.label for row in rows[:6]]


def test_timeline_is_drawn_for_one_worker_and_for_many(tmp_path: Path) -> None:
    lone = make_trace("simulated", 1, workers=["solo"], islands={}, microbatches=3)
    width, height = png_size(draw_timeline(lone, tmp_path / "one.png"))
    predicted, measured = make_trace("simulated", 1, microbatches=4), make_trace("measured", 4, noise=0.1, microbatches=4)
    both = png_size(draw_timeline(predicted, tmp_path / "two.png", measured=measured, memory=make_memory(predicted),
                                  islands=demo.ISLANDS, name="demo"))
    assert both[0] == width and both[1] > 2 * height
    many = [f"n{i}" for i in range(18)]
    crowd = make_trace("simulated", 1, workers=many, islands=dict.fromkeys(many, "x"), microbatches=3)
    assert png_size(draw_timeline(crowd, tmp_path / "many.png"))[1] > 0


def test_timeline_refuses_a_step_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="no step 7"):
        panel("Predicted", make_trace("simulated", 1), step=7)
    with pytest.raises(AtollError, match="no step that is complete"):
        draw_timeline(as_trace([]), tmp_path / "x.png")


def test_smoothing_does_not_lag() -> None:
    line = [2.0 * x for x in range(9)]
    assert smoothed(line, 3) == pytest.approx(line)
    assert smoothed([0.0, 3.0, 0.0, 3.0, 0.0], 1) == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_pictures_say_what_they_lack(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="no line with a loss"):
        draw_loss(tmp_path / "l.png", (), ())
    with pytest.raises(AtollError, match="no message travelled"):
        draw_links(tmp_path / "k.png", [span("a", "0F0", "compute", 0, 1)], None)
    with pytest.raises(AtollError, match="no complete step"):
        draw_workers(tmp_path / "w.png", None, None, ("a",))


def test_report_of_a_whole_run(tmp_path: Path) -> None:
    paths = write_report(write_run(tmp_path / "run", steps=12, microbatches=3))
    for path in (paths.timeline_png, paths.loss_png, paths.links_png, paths.throughput_png, paths.workers_png):
        assert path is not None and png_size(Path(path))[0] > 1000
    assert paths.perfetto_json is not None
    check_perfetto(json.loads(Path(paths.perfetto_json).read_text()))
    record = json.loads(Path(paths.json).read_text())
    assert record["comparison"]["twin"]["holds"] is True and record["troubles"] == [] and record["notes"] == []
    assert record["training"]["tokens"] == 12 * 768 and record["training"]["steps"] == 12
    html = Path(paths.html).read_text()
    assert html.count("data:image/png;base64,") == 5
    assert not re.search(r"(src|href)=\"?https?:", html) and "<script" not in html
    for text in ("bee limits the step", "The twin law holds", "50 Mbit/s", "prefers-color-scheme: dark", "@media print",
                 "Predicted peak memory"):
        assert text in html


def test_tokens_and_times_of_steps_are_summed_and_a_resumed_step_counts_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": 0, "loss": 3.0, "tokens": 10, "step_ns": 5}, {"step": 1, "loss": 2.5, "tokens": 10, "step_ns": 5},
             {"step": 1, "validation_loss": 2.6}, {"step": 1, "loss": 2.4, "tokens": 10, "step_ns": 5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "lo')
    run = load_run(folder)
    assert [(point.loss, point.tokens_seen, point.time_ns) for point in run.steps] == [(3.0, 10, 5), (2.4, 20, 10)]
    assert run.evaluations[0].tokens_seen == 20 and run.steps[0].tokens_per_s == 2e9
    assert any("1 line cannot be read" in note for note in run.notes)


def test_the_clock_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0, "tokens": 1, "time_ns": time} for step, time in enumerate((10, 20, 30, 10, 20))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [point.time_ns for point in load_run(tmp_path).steps] == [10, 20, 30, 40, 50]


def test_report_of_a_run_that_died(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5, microbatches=2)
    trace = (folder / "trace.jsonl").read_bytes()
    (folder / "trace.jsonl").write_bytes(trace[: len(trace) - 900])
    (folder / "plan.yaml").unlink()
    (folder / "cluster.yaml").write_text("islands: [")
    job = json.loads((folder / "job.yaml").read_text())
    (folder / "job.yaml").write_text(json.dumps({**job, "steps": 100}))
    paths = write_report(folder)
    html = Path(paths.html).read_text()
    assert paths.timeline_png and paths.loss_png
    assert "stopped after step 4; the job asks for 100 steps" in html
    assert "plan.yaml is missing" in html and "cluster.yaml cannot be read" in html
    assert "step 4 broke off and is left out" in html


def test_a_picture_that_fails_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Path:
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr("atoll.report.page.draw_panels", broken)
    paths = write_report(write_run(tmp_path / "run", steps=3, microbatches=2))
    assert paths.timeline_png is None and paths.loss_png is not None and paths.links_png is not None
    record = json.loads(Path(paths.json).read_text())
    assert record["troubles"] == ["Timeline: could not be made (ZeroDivisionError: no ink)."]
    assert "no ink" in Path(paths.html).read_text()


def test_only_a_plan_and_a_prediction_make_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, microbatches=2)
    for name in ("trace.jsonl", "metrics.jsonl"):
        (folder / name).unlink()
    paths = write_report(folder)
    assert paths.timeline_png and paths.links_png and paths.loss_png is None
    assert "none was measured" in Path(paths.html).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such run folder"):
        write_report(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentError, match="not a run folder"):
        write_report(tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_names_from_documents_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.yaml").write_text("name: <b>demo</b>")
    (folder / "explain.txt").write_text("a < b & <script>alert(1)</script>\n")
    html = Path(write_report(folder).html).read_text()
    assert "<script" not in html and "<b>" not in html and "&lt;script&gt;" in html


def printed(thing: Any) -> str:
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


def test_console_tables_say_what_the_page_says(tmp_path: Path) -> None:
    from atoll.report import text

    shown = printed(text.cluster_table(demo.CLUSTER))
    assert "4 workers on 2 islands: home (2), lab (2)" in shown and "50 Mbit/s" in shown and "25 ms" in shown
    shown = printed(text.prediction_table(SUMMARY))
    assert "step 1.65 s, 1.24k tokens/s" in shown and "256 MiB" in shown and "25.0 %" in shown and "home → lab" in shown
    shown = printed(text.comparison_table(compare(make_trace("simulated", 1), make_trace("measured", 4, noise=0.1))))
    assert "The twin law holds" in shown and "bee → cat" in shown and "−" in shown
    run = load_run(write_run(tmp_path / "run", steps=2))
    assert "h.2 … h.3" in printed(text.plan_stages(run.plan))
    assert "64 MiB" in printed(text.memory_tables(SUMMARY))


def test_a_long_table_is_cut_and_counted() -> None:
    from atoll.report.tables import Table
    from atoll.report.text import MOST_ROWS, rich_table

    table = Table(title="t", columns=("a",), rows=tuple((f"row [{i}]",) for i in range(MOST_ROWS + 3)))
    shown = printed(rich_table(table))
    assert "… and 3 more" in shown and "row [0]" in shown and f"row [{MOST_ROWS}]" not in shown


def test_importing_the_report_loads_no_heavy_library() -> None:
    import subprocess
    import sys

    code = ("import sys, atoll.report.page, atoll.report.text; "
            "print([m for m in ('matplotlib', 'numpy', 'rich', 'torch', 'yaml') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
