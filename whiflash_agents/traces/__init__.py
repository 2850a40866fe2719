"""Recorded agent traces: the schema, one reader per format, validation."""
