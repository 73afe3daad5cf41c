"""Generated from proto/rootward/v1 by `make proto`; never edited by hand."""
