"""Turns and sessions as OpenTelemetry spans, for those who have a collector. Off unless `otel_endpoint` is set."""
