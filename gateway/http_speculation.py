"""`speculation` of a body: a boolean, a mode or an object."""

from __future__ import annotations

from gateway.http_values import integer, one, short
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode
from rootward.errors import InvalidRequest, UnsupportedParameter

_RULES: dict[str, tuple[Rule, DraftMode | None]] = {
    "traversal": (Rule.TRAVERSAL, None),
    "coupled": (Rule.MATCH, DraftMode.COUPLED),
    "token": (Rule.TOKEN, None),
}
_NAMES = {"mode", "verification", "max_depth", "topk", "num_draft_tokens", "drafter"}


def speculation(value: object) -> Speculation:
    """true, false, a mode, or an object."""
    if value is None or value is True:
        return Speculation()
    if value is False:
        return Speculation(SpeculationMode.DISABLED)
    if isinstance(value, str):
        return Speculation(_mode(value))
    if not isinstance(value, dict):
        raise InvalidRequest("speculation", short(value), "is neither a boolean nor a mode nor an object")
    odd = next((name for name in value if name not in _NAMES), None)
    if odd is not None:
        raise UnsupportedParameter(f"speculation.{odd[:32]}", short(value[odd]), "is not supported; leave it out")
    rule, law = _verification(value.get("verification"))
    sizes = {name: one(value, name, integer, None) for name in ("num_draft_tokens", "max_depth", "topk")}
    drafter = value.get("drafter") or ""
    if not isinstance(drafter, str):
        raise InvalidRequest("speculation.drafter", short(drafter), "is no text; name a pool of drafters, or 'ngram'")
    return Speculation(_mode(value.get("mode") or "auto"), rule, law, **sizes, drafter=drafter)


def _mode(value: object) -> SpeculationMode:
    try:
        return SpeculationMode(value)
    except ValueError:
        fix = "is unknown; use 'auto', 'disabled' or 'required'"
        raise InvalidRequest("speculation.mode", short(value), fix) from None


def _verification(value: object) -> tuple[Rule | None, DraftMode | None]:
    if value is None:
        return None, None
    if not isinstance(value, str) or value not in _RULES:
        fix = "is unknown; use 'traversal', 'coupled' or 'token'"
        raise InvalidRequest("speculation.verification", short(value), fix)
    return _RULES[value]
