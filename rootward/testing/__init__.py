"""What ships for tests and benchmarks of services: a link between two of them that is as bad as one likes (`slow_link`)."""
