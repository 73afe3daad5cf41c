"""The verifier: owns the truth. Target KV, the round loop, every committed token."""
