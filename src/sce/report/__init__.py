"""Runs and sweeps as self-contained HTML pages, charts and tables; needs the extra `report`."""
