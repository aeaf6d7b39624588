"""Traces: written and read back, read after a crash, refused with the line, compared span by span."""

from __future__ import annotations

import pytest

from atoll.errors import DocumentError
from atoll.trace.diff import diff
from atoll.trace.files import TraceWriter, read_trace, write_trace
from atoll.trace.span import Span, Trace, TraceHeader

pytestmark = pytest.mark.null

HEADER = TraceHeader(program="abc", clock="simulated", workers=("a", "b"))


def span(worker: str, step: int, instruction: int, start: int, end: int, **other: object) -> Span:
    fields: dict[str, object] = {"name": f"0F{instruction}", "lane": "compute", "size_bytes": 0, **other}
    return Span(worker=worker, step=step, instruction=instruction, start_ns=start, end_ns=end, **fields)  # type: ignore[arg-type]


def trace(*spans: Span) -> Trace:
    return Trace(header=HEADER, spans=spans)


EXAMPLE = trace(span("a", 0, 0, 0, 10), span("a", 0, 1, 10, 12, name="SEND", lane="out:b", size_bytes=7),
                span("b", 0, 0, 10, 20, name="RECV", lane="in:a", size_bytes=7), span("a", 1, 0, 20, 30))


def test_round_trip(tmp_path):
    write_trace(tmp_path / "trace.jsonl", EXAMPLE)
    assert read_trace(tmp_path / "trace.jsonl") == EXAMPLE
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1 + len(EXAMPLE.spans)


def test_writer_is_readable_while_it_writes_and_after_a_crash(tmp_path):
    path = tmp_path / "deep" / "trace.jsonl"
    with TraceWriter(path, HEADER) as writer:
        writer.write(EXAMPLE.spans[:2])
        assert read_trace(path).spans == EXAMPLE.spans[:2]
        writer.write(EXAMPLE.spans[2:])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert read_trace(path).spans == EXAMPLE.spans[:-1]


@pytest.mark.parametrize(("line", "text", "said"), [
    (2, b'{"worker": "a"}', "line 2"),
    (3, b"nonsense", "line 3"),
    (1, b'{"clock": "simulated"}', "line 1"),
    (1, b'{"program":"p","clock":"measured","workers":[],"schema":99}', "schema 99"),
])
def test_a_broken_line_is_named(tmp_path, line, text, said):
    path = tmp_path / "trace.jsonl"
    write_trace(path, EXAMPLE)
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = text
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DocumentError, match=said) as caught:
        read_trace(path)
    assert "trace.jsonl" in str(caught.value)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DocumentError, match="header"):
        read_trace(tmp_path / "empty.jsonl")


def test_a_trace_is_the_same_as_itself():
    found = diff(EXAMPLE, EXAMPLE)
    assert found.same
    assert found.median_step_error == 0
    assert [step.first_ns for step in found.steps] == [20, 10]
    assert "same spans" in found.sentence()


def test_missing_extra_and_changed_spans_are_found():
    other = trace(EXAMPLE.spans[0], span("a", 0, 1, 10, 12, name="SEND", lane="out:b", size_bytes=8), EXAMPLE.spans[3],
                  span("b", 1, 5, 3, 4))
    found = diff(EXAMPLE, other)
    assert not found.same
    assert found.missing == (("b", 0, 0),)
    assert found.extra == (("b", 1, 5),)
    assert [(change.field, change.first, change.second) for change in found.changed] == [("size_bytes", 7, 8)]
    assert "size_bytes of instruction 1 of a in step 0: 7 against 8" in found.sentence()


def test_times_do_not_break_sameness_and_are_measured():
    slower = trace(*(span(s.worker, s.step, s.instruction, 2 * s.start_ns, 2 * s.end_ns, name=s.name, lane=s.lane,
                          size_bytes=s.size_bytes) for s in EXAMPLE.spans))
    found = diff(EXAMPLE, slower)
    assert found.same
    assert found.median_step_error == 0.5
    assert {(error.kind, error.lane, error.count, error.median_error) for error in found.durations} == {
        ("F", "compute", 2, -0.5), ("SEND", "out", 1, -0.5), ("RECV", "in", 1, -0.5)}


def test_the_last_predicted_step_stands_for_later_ones():
    predicted = trace(span("a", 0, 0, 0, 10), span("a", 1, 0, 10, 18))
    measured = trace(span("a", 0, 0, 0, 10), span("a", 1, 0, 10, 18), span("a", 2, 0, 18, 26), span("a", 3, 0, 26, 42))
    assert not diff(predicted, measured).same
    found = diff(predicted, measured, repeat_last=True)
    assert found.same
    assert [step.first_ns for step in found.steps] == [10, 8, 8, 8]
    assert [step.error for step in found.steps] == [0, 0, 0, -0.5]
