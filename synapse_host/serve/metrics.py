"""A host's counters and gauges as Prometheus metrics, ``synapse_worker_*``; needs the extra ``serve``.

Everything is read when somebody asks: serving requests costs integer additions only
(:mod:`synapse_host.worker.counters`). :func:`text` renders once, for ``GET /metrics``. Whoever asks, on whatever
thread, the values are read on the host's loop, which alone writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from synapse_host.serve import require

require("prometheus_client")
from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.core import CounterMetricFamily as Counter  # noqa: E402
from prometheus_client.core import GaugeMetricFamily as Gauge  # noqa: E402
from prometheus_client.core import HistogramMetricFamily as Buckets  # noqa: E402

if TYPE_CHECKING:
    from synapse_host.host import Host
    from synapse_host.worker.counters import Histogram, LaneCounters

PREFIX: Final = "synapse_worker_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MIB: Final = 1024 * 1024


def text(host: Host) -> str:
    """Return the metrics of *host* in Prometheus' text format; from any thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(host))
    rendered: bytes = generate_latest(registry)
    return rendered.decode()


class Collector:
    """What prometheus-client asks for samples; register it with any registry of an application."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Sequence[Any]:
        """Return every metric family with its present values, read on the host's loop; from any thread."""
        return self._host.on_loop(lambda: list(self._families()))

    def _families(self) -> Iterator[Any]:
        # Not the lane's id, which changes where a second model is installed: a series would end and another begin.
        labels = {id: f"{item.lane}:{item.model}" for id, item in self._host.assignments.items()}
        counters = {labels[id]: counts for id, counts in self._host.counters.items()}
        lanes: dict[str, dict[str, Any]] = {labels[id]: lane for id, lane in self._host.health()["lanes"].items()}
        yield from _traffic(counters)
        yield from _failures(counters)
        yield from _states(lanes)
        yield from _silence(counters, self._host)


def _traffic(counters: dict[str, LaneCounters]) -> Iterator[Any]:
    requests = _family(Counter, "requests", "Requests by operation and outcome (ok or an error code).", "op", "outcome")
    durations = _family(
        Buckets,
        "request_duration_seconds",
        "From the call to the reply, waiting included; answered requests only.",
        "op",
    )
    overhead = _family(
        Buckets,
        "ipc_overhead_seconds",
        "Round trip of PING to an idle worker: wire, wake-ups and worker loop, no model work.",
    )
    loads = _family(Buckets, "load_duration_seconds", "LOAD exchanges, from sending to LOADED.")
    shared = _family(Buckets, "calls_per_exchange", "Calls that shared one exchange with the worker.")
    transferred = _family(Counter, "bytes", "Bytes on the worker's connection, framing included.", "direction")
    for lane, counts in counters.items():
        for (op, outcome), number in counts.requests.items():
            requests.add_metric([lane, op, outcome], number)
        for op, histogram in counts.durations.items():
            _observe(durations, [lane, op], histogram)
        _observe(overhead, [lane], counts.ipc)
        _observe(loads, [lane], counts.loads)
        _observe(shared, [lane], counts.shared)
        transferred.add_metric([lane, "sent"], counts.sent)
        transferred.add_metric([lane, "received"], counts.received)
    yield from (requests, durations, overhead, loads, shared, transferred)


def _failures(counters: dict[str, LaneCounters]) -> Iterator[Any]:
    restarts = _family(
        Counter, "restarts", "Workers started in place of one that ended, by how that one ended.", "reason"
    )
    rejected = _family(Counter, "frames_rejected", "Breaches of the protocol by workers, by reason.", "reason")
    abandoned = _family(Counter, "abandoned_replies", "Replies that were drained after their caller had left.")
    for lane, counts in counters.items():
        for reason, number in counts.restarts.items():
            restarts.add_metric([lane, reason], number)
        for reason, number in counts.rejected.items():
            rejected.add_metric([lane, reason], number)
        abandoned.add_metric([lane], counts.abandoned)
    yield from (restarts, rejected, abandoned)


def _states(lanes: dict[str, dict[str, Any]]) -> Iterator[Any]:
    info = _family(Gauge, "info", "1 for each lane, with what serves it.", "model", "engine", "device", "state")
    waiting = _family(Gauge, "queue_length", "Requests that wait for the lane.")
    strikes = _family(Gauge, "strikes", "Strikes in a row; two quarantine the lane.")
    quarantined = _family(Gauge, "quarantined", "1 while the lane is quarantined.")
    remaining = _family(
        Gauge, "quarantine_remaining_seconds", "Until the lane opens again; +Inf when only a probe opens it."
    )
    rss = _family(Gauge, "rss_bytes", "Resident memory of the worker, from its last PONG.")
    share = _family(
        Gauge, "placement_share", "Share of operations that can run on the Neural Engine, from the last PONG."
    )
    for lane, health in lanes.items():
        described = [str(health[key] or "") for key in ("model", "engine", "device", "state")]
        info.add_metric([lane, *described], 1)
        waiting.add_metric([lane], health.get("waiting", 0))
        strikes.add_metric([lane], health["strikes"])
        quarantined.add_metric([lane], int(health["state"] == "quarantined"))
        seconds = health["quarantine_remaining_s"]
        remaining.add_metric([lane], math.inf if seconds is None else seconds)
        if health["rss_mb"] is not None:
            rss.add_metric([lane], health["rss_mb"] * MIB)
        if health.get("placement_share") is not None:
            share.add_metric([lane], health["placement_share"])
    yield from (info, waiting, strikes, quarantined, remaining, rss, share)


def _silence(counters: dict[str, LaneCounters], host: Host) -> Iterator[Any]:
    gap = _family(
        Gauge,
        "progress_gap_seconds",
        "Longest silence within an exchange so far, by the window it counts against.",
        "window",
    )
    limit = _family(Gauge, "silence_window_seconds", "Silence after which a worker is killed.", "window")
    windows = host.config.windows
    for lane, counts in counters.items():
        for name in ("setup", "control", "ping", "inference"):
            if name in counts.gaps:
                gap.add_metric([lane, name], counts.gaps[name])
            limit.add_metric([lane, name], getattr(windows, name))
    yield from (gap, limit)


def _family(kind: Any, name: str, help: str, *labels: str) -> Any:
    return kind(PREFIX + name, help, labels=["lane", *labels])


def _observe(family: Any, labels: list[str], histogram: Histogram) -> None:
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), sum_value=histogram.total)
