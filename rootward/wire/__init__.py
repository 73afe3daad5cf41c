"""Where protobuf and domain types meet: codecs, error statuses, servers and remote implementations of the ports."""
