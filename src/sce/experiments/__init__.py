"""Sweeps over settings, and what came of them side by side: `sce sweep` and `sce compare`."""
