"""Adapters for agent frameworks. The only place that imports LangChain."""
