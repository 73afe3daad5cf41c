"""`rootward doctor`: checks of a machine or of a running system, with advice.

    findings  a finding, and how severe it is
    machine   this machine: cores, memory, processor, GPU, packages, limits
    system    a running gateway, its verifiers and drafters, Redis, certificates, clocks

Each has facts, which `look` collects, and `judge`, a pure function of them.
"""
