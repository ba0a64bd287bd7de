"""Metrics of what the store holds, computed when somebody asks for them."""

from __future__ import annotations

import logging
import math
from typing import get_args

from engine.errors import StoreError
from server import metrics
from server.storage.records import BatchStatus
from server.storage.store import Store

log = logging.getLogger(__name__)


def update_gauges(store: Store) -> None:
    """Set the gauges of files and batches; NaN where the store does not work. Blocks."""
    try:
        num_bytes: float = store.bytes_of()
        counts: dict[str, float] = {**store.count_batches()}
    except StoreError as error:
        log.warning("metrics have no files and batches: %s", error.message)
        num_bytes, counts = math.nan, dict.fromkeys(get_args(BatchStatus), math.nan)
    metrics.FILES_BYTES.set(num_bytes)
    for status in get_args(BatchStatus):
        metrics.BATCHES.labels(status).set(counts.get(status, 0))
