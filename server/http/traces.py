"""OpenTelemetry spans, one for each request, where `otlp_endpoint` says where to send them.

The packages are the extra `traces`: nothing else needs them, and nothing is sent
without the setting. A span is made when its request has ended, out of what is known then.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from starlette.types import Scope

from srm.errors import ConfigError
from srm.server.http.headers import headers_of
from srm.server.http.request_log import LogEntry

_INVALID_STATUS = 500


class Tracer:
    """Sends spans in the background. Raises ConfigError where the packages are missing."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            api: Any = import_module("opentelemetry.trace")
            sdk: Any = import_module("opentelemetry.sdk.trace")
            export: Any = import_module("opentelemetry.sdk.trace.export")
            resources: Any = import_module("opentelemetry.sdk.resources")
            otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            propagation: Any = import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint = {endpoint!r} needs packages that are not here ({error.name}): "
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            ) from None
        resource = resources.Resource.create({"service.name": "srm", "srm.model": model_name})
        self.provider = sdk.TracerProvider(resource=resource)
        self.provider.add_span_processor(
            export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint))
        )
        self._tracer = self.provider.get_tracer("srm")
        self._parents = propagation.TraceContextTextMapPropagator()
        self._server_kind = api.SpanKind.SERVER
        self._failed = api.Status(api.StatusCode.ERROR)

    def record(
        self, scope: Scope, route: str, status: int, started_ns: int, entry: LogEntry
    ) -> None:
        """Record the span of a request that ends now and began at `started_ns`, Unix time."""
        parent = self._parents.extract(headers_of(scope))
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=parent,
            kind=self._server_kind,
            start_time=started_ns,
            attributes={
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
                **{f"srm.{name}": value for name, value in entry.fields().items()},
            },
        )
        if status >= _INVALID_STATUS:
            span.set_status(self._failed)
        span.end(end_time=time.time_ns())

    def close(self) -> None:
        """Send what is left."""
        self.provider.shutdown()
