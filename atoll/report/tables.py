"""The tables of a report as plain text cells, once, for the console (``text``) and for the page (``page``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.errors import AtollError
from atoll.records import Record, from_plain
from atoll.report.compare import Comparison
from atoll.report.run import worker_machines
from atoll.units import Bandwidth, Duration, Quantity, format_bandwidth, format_bytes, format_duration, format_flop_rate

__all__ = ["Table", "cluster_tables", "kind_table", "lane_table", "memory_table", "plan_table", "prediction_links",
           "prediction_workers", "signed", "step_table", "worker_table"]

NONE = "–"
MEMORY_PARTS = ("weights", "gradients", "optimizer", "working", "activations", "buffers")


class Table(Record):
    """``labels``: how many leading columns are words (left aligned); the rest are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


def signed(percent: float | None) -> str:
    """An error such as "+2.1 %", with a true minus sign."""
    return NONE if percent is None else f"{percent:+.1f} %".replace("-", "−")


def _show(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)


def _share(value: float | None) -> str:
    return _show(value, lambda share: f"{100 * share:.1f} %")


def _quantity(value: Any, kind: type[Quantity], form: Callable[[float], str]) -> str:
    """A quantity of a document, whether it was written with a unit or is in base units already."""
    if value is None:
        return NONE
    try:
        return form(kind.parse(value))
    except ValueError:
        return str(value)


def step_table(comparison: Comparison) -> Table:
    step = comparison.step
    spread = NONE if step.low_ns is None or step.high_ns is None else (
        f"{format_duration(step.low_ns)} to {format_duration(step.high_ns)}")
    rows = (
        ("step time (median)", _show(step.predicted_ns, format_duration), _show(step.measured_ns, format_duration),
         signed(step.error_percent)),
        *(((f"middle 80 % of {step.steps} steps", "", spread, ""),) if step.steps > 1 else ()),
        ("bubble, share of the step", _share(step.predicted_bubble_makespan), _share(step.measured_bubble_makespan), ""),
        ("bubble, share of each worker's own span", _share(step.predicted_bubble_span), _share(step.measured_bubble_span), ""),
    )
    return Table(title="Step", columns=("", "predicted", "measured", "error"), rows=rows)


def worker_table(comparison: Comparison) -> Table:
    rows = []
    for row in comparison.workers:
        rows.append((row.worker, _show(row.predicted_compute_ns, format_duration),
                     _show(row.measured_compute_ns, format_duration), signed(row.error_percent),
                     _show(row.predicted_exposed_ns, format_duration),
                     _show(row.measured_exposed_ns, format_duration), _show(row.predicted_waiting_ns, format_duration),
                     _show(row.measured_waiting_ns, format_duration)))
    return Table(title="Workers, one step", columns=(
        "worker", "compute predicted", "measured", "error", "exposed communication predicted", "measured", "waiting predicted",
        "measured"), rows=tuple(rows))


def kind_table(comparison: Comparison) -> Table:
    """Mean duration of each kind of compute on each worker."""
    rows = [(row.worker, row.kind, str(row.count), _show(row.predicted_ns, format_duration),
             _show(row.measured_ns, format_duration), signed(row.error_percent)) for row in comparison.kinds]
    return Table(title="Instructions, mean duration", columns=("worker", "kind", "a step", "predicted", "measured", "error"),
                 rows=tuple(rows), labels=2)


def lane_table(comparison: Comparison, *, links_only: bool = False) -> Table:
    """Bytes and time of each lane in one step; ``links_only``: just what goes out to peers."""
    rows = []
    for row in comparison.lanes:
        if links_only and not row.lane.startswith(("out:", "native")):
            continue
        link = f"{row.worker} → {row.lane[4:]}" if row.lane != "native" else f"{row.worker}, collectives"
        name = (link,) if links_only else (row.worker, row.lane)
        rows.append((*name, _show(row.predicted_bytes, format_bytes), _show(row.measured_bytes, format_bytes),
                     _show(row.predicted_busy_ns, format_duration), _show(row.measured_busy_ns, format_duration),
                     signed(row.error_percent)))
    names = ("link",) if links_only else ("worker", "lane")
    return Table(title="Links, one step" if links_only else "Lanes, one step",
                 columns=(*names, "bytes predicted", "measured", "busy predicted", "measured", "error"), rows=tuple(rows),
                 labels=len(names))


def memory_table(summary: Mapping[str, Any]) -> Table | None:
    """Predicted peak memory of each worker against what it has, and what it is made of; None without such a summary."""
    rows = []
    try:
        for worker, entry in summary["workers"].items():
            memory = entry["memory"]
            parts = [format_bytes(memory[f"{part}_bytes"]) for part in MEMORY_PARTS]
            capacity = memory["capacity_bytes"]
            rows.append((str(worker), format_bytes(memory["peak_bytes"]), format_bytes(capacity),
                         _share(memory["peak_bytes"] / capacity if capacity else None), *parts))
    except (KeyError, TypeError, AttributeError):
        return None
    return Table(title="Memory", columns=("worker", "peak", "has", "used", *MEMORY_PARTS), rows=tuple(rows))


def prediction_workers(summary: Mapping[str, Any]) -> Table:
    """Per worker: device, how busy it will be, how long it stands still for messages, its peak memory against its own."""
    rows = []
    for worker, entry in summary["workers"].items():
        memory = entry["memory"]
        capacity = memory["capacity_bytes"]
        rows.append((str(worker), str(entry["device"]), f"{entry['speed']:g}", _share(entry["busy_share"].get("compute", 0.0)),
                     format_duration(entry["exposed_ns"]), format_bytes(memory["peak_bytes"]), format_bytes(capacity),
                     _share(memory["peak_bytes"] / capacity if capacity else None)))
    return Table(title="Workers", columns=("worker", "device", "speed", "computing", "exposed communication", "peak memory",
                                           "of", "used"), rows=tuple(rows), labels=2)


def prediction_links(summary: Mapping[str, Any]) -> Table:
    """Per directed segment, the busiest first: bytes of one step, rate, share of the step in which it is full."""
    links = sorted(summary["links"].items(), key=lambda item: -item[1]["busy_share"])
    rows = tuple((name.replace(">", " → "), format_bytes(entry["size_bytes"]), format_bandwidth(entry["bytes_per_s"]),
                  _share(entry["busy_share"])) for name, entry in links)
    return Table(title="Links", columns=("link", "bytes a step", "rate", "busy"), rows=rows)


def plan_table(plan: Mapping[str, Any]) -> Table | None:
    """Stages and where they run; None when the plan is missing or has another shape."""
    try:
        rows = [(str(number), str(index), f"{stage['first']} … {stage['last']}", str(stage["worker"]),
                 "yes" if stage.get("recompute") else "no", str(replica["microbatches"]))
                for number, replica in enumerate(plan["replicas"]) for index, stage in enumerate(replica["stages"])]
    except (KeyError, TypeError):
        return None
    return Table(title="Stages", columns=("replica", "stage", "operators", "worker", "recompute", "microbatches"),
                 rows=tuple(rows), labels=5)


def cluster_tables(cluster: Mapping[str, Any]) -> list[Table]:
    """Workers, islands, links and shared segments of a cluster document in plain values."""
    plain = dict(cluster)
    islands = plain.get("islands") if isinstance(plain.get("islands"), dict) else {}
    tables = []
    workers = []
    for worker, entry in worker_machines(plain).items():
        device = entry["device"]
        speed = device.get("speed", 1.0)
        workers.append((worker, entry["machine"], entry["island"], str(device.get("kind", NONE)),
                        f"{speed:g}" if isinstance(speed, int | float) else str(speed), *_figures_of(device)))
    tables.append(Table(title="Workers", columns=("worker", "machine", "island", "device", "speed", "memory", "peak float32",
                                                  "peak bfloat16"), rows=tuple(workers), labels=4))
    rows = [(f"inside {name}", _quantity(island.get("bandwidth"), Bandwidth, format_bandwidth), "",
             _quantity(island.get("latency", 0), Duration, format_duration), "island")
            for name, island in (islands or {}).items() if isinstance(island, dict)]
    for link in _dictionaries(plain.get("links")):
        ends = link.get("between") or ("?", "?")
        rows.append((f"{ends[0]} ↔ {ends[-1]}", _quantity(link.get("bandwidth"), Bandwidth, format_bandwidth),
                     _quantity(link.get("bandwidth_back") or link.get("bandwidth"), Bandwidth, format_bandwidth),
                     _quantity(link.get("latency", 0), Duration, format_duration), str(link.get("kind", "internet"))))
    for segment in _dictionaries(plain.get("segments")):
        rows.append((f"{segment.get('name', '?')} (shared by {', '.join(map(str, segment.get('machines') or ()))})",
                     _quantity(segment.get("up"), Bandwidth, format_bandwidth),
                     _quantity(segment.get("down"), Bandwidth, format_bandwidth),
                     _quantity(segment.get("latency", 0), Duration, format_duration), "shared segment"))
    tables.append(Table(title="Links", columns=("link", "there", "back", "latency", "kind"), rows=tuple(rows)))
    return tables


def _figures_of(device: dict[str, Any]) -> tuple[str, str, str]:
    """Memory and peak rates (speed included) as the catalogue completes them; dashes where it cannot."""
    from atoll.cluster.catalogue import resolve
    from atoll.cluster.cluster import Device

    try:
        known = resolve(from_plain(device, Device))
    except AtollError:
        return NONE, NONE, NONE
    rates = [known.flops.get(dtype) for dtype in ("float32", "bfloat16")]
    single, half = (_show(rate and rate * known.speed, format_flop_rate) for rate in rates)
    return _show(known.memory, format_bytes), single, half


def _dictionaries(value: Any) -> Sequence[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list | tuple) else []
