"""gRPC: codecs between protobuf and domain types, error statuses, servers, and remote implementations of the ports."""
