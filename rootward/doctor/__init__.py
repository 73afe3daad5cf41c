"""`rootward doctor`: looks at a machine or at a running system, and says what to change.

    findings  a finding, and how severe it is
    machine   this machine: cores, memory, processor, GPU, packages, limits
    system    a running gateway, its verifiers and drafters, Redis, certificates, clocks

Each has facts, which `look` collects, and `judge`, a pure function of them.
"""
