"""A finding of the doctor."""

from __future__ import annotations

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


def graded(name: str, found: str, *, problem: str = "", warning: str = "") -> Finding:
    """The finding with the graver of two pieces of advice, ok without any."""
    level = Level.PROBLEM if problem else Level.WARNING if warning else Level.OK
    return Finding(name, level, found, problem or warning)
