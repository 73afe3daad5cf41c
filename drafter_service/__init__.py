"""The drafter: grows token trees for verifiers. Holds nothing that cannot be rebuilt from prompt, committed tokens and seed."""
