"""Memory that training will take, before it is tried."""

from sce.planning.summary import summarize_data

__all__ = ["summarize_data"]
