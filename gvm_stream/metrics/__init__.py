"""What a process shows of itself to Prometheus: the table of all metrics, and their values."""

from __future__ import annotations

from gvm_stream.metrics.endpoint import PORTS_TRIED as PORTS_TRIED
from gvm_stream.metrics.registry import Metrics as Metrics
from gvm_stream.metrics.table import TABLE as TABLE
from gvm_stream.metrics.table import Role as Role
from gvm_stream.metrics.table import Spec as Spec
