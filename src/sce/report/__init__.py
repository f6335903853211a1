"""A run as one page: self-contained HTML with figures drawn here, readable without a network."""
