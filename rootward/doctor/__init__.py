"""`rootward doctor`: checks of a machine or of a running system, with advice.

    machine   this machine: cores, memory, processor, GPU, limits
    system    a running gateway, its verifiers and drafters, Redis, certificates, clocks

Each has facts, which `look` collects, and `judge`, a pure function of them.
"""

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"  # it works, slower or less safely than it could
    PROBLEM = "problem"  # something does not work, or soon will not


@dataclass(frozen=True, slots=True)
class Finding:
    """name: what was looked at; found: in a few words; advice: what to change, "" where nothing is wrong."""

    name: str
    level: Level
    found: str
    advice: str = ""


def graded(name: str, found: str, advice: str = "", *, problem: bool = False, warning: bool = False) -> Finding:
    """The finding of the graver level that applies; without any it is ok and the advice is dropped."""
    if not (problem or warning):
        return Finding(name, Level.OK, found)
    return Finding(name, Level.PROBLEM if problem else Level.WARNING, found, advice)
