"""Ranking of the whole catalogue, and its metrics."""
