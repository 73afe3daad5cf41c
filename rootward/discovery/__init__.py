"""Discovery of workers: a static list, DNS, the registry in Redis, or EndpointSlices of Kubernetes. One `ports.Discovery` each."""
