"""`--metrics-port`: serves the figures of a running job to Prometheus, by the library prometheus_client.

A separate thread answers with the figures that `Status` has collected last, so a scrape delays neither the ranks nor
the launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from collectives.errors import how_to_install
from launcher.console.status import Status
from launcher.diagnosis.observer import Observer
from launcher.errors import UsageError

#: The figures of `Status.ranks` that are served, and the metric of each. docs/launcher.md describes them.
METRICS = {
    "step": "ddp_step",
    "step/s": "ddp_steps_per_second",
    "samples": "ddp_samples_total",
    "samples/s": "ddp_samples_per_second",
    "loss": "ddp_loss",
    "exposed": "ddp_exposed_communication_seconds_total",
    "waited": "ddp_waited_for_seconds_total",
    "slowest": "ddp_slowest_rank",
    "reduced_bytes": "ddp_reduced_bytes_total",
    "restarts": "ddp_restarts_total",
    "rss": "ddp_resident_memory_bytes",
    "device_bytes": "ddp_device_memory_bytes",
}


class MetricsServer(Observer):
    """Serves metrics at http://HOST:PORT/metrics until the job has ended.

    address: host and port
    Raises: UsageError if prometheus_client is not installed, or the port cannot be opened.
    """

    def __init__(self, address: tuple[str, int], status: Status) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UsageError(f"--metrics-port needs prometheus_client: {how_to_install('prometheus')}") from None
        host, port = address
        self._status = status
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise UsageError(f"metrics cannot be served at {host}:{port}: {error}") from None

    def collect(self) -> Iterator[Any]:
        """The metrics. prometheus_client calls this at each scrape, in its thread."""
        from prometheus_client import metrics_core

        for key, name in METRICS.items():
            cls = metrics_core.CounterMetricFamily if name.endswith("_total") else metrics_core.GaugeMetricFamily
            metric = cls(name, f"{key} of a rank", labels=["rank"])
            for figures in self._status.ranks:
                if figures.get(key) is not None:
                    metric.add_metric([str(figures["rank"])], figures[key])
            yield metric

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
