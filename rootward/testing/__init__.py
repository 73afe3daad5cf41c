"""Tools for tests and benchmarks of services: a slow or lossy link between two of them (`slow_link`), a drafter that cheats
(`dishonest`)."""
