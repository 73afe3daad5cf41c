"""The gateway: owns the client. Text, tokens ↔ text, admission, routing, resume; token ids go on to a verifier."""
