"""Grafana dashboards, built in code: `python -m gvm_stream.dashboards` writes those of ops/grafana/ (extra `ops`)."""
