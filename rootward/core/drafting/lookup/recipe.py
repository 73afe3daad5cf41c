"""From a name to sources: `ngram:`, `recycling:width=8`, `ngram+recycling:`, `random:vocab=40,seed=1`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootward.core.drafting.lookup.ngram import Ngram
from rootward.core.drafting.lookup.random_tokens import RandomTokens
from rootward.core.drafting.lookup.recycling import WIDTH, Recycling, Successors
from rootward.core.drafting.lookup.source import Merged, Source
from rootward.core.requests import DraftMode

Settings = dict[str, Any]

KEYS: dict[str, dict[str, Callable[[str], Any]]] = {
    "ngram": {"contexts": int},
    "recycling": {"width": int, "acceptance": float},
    "random": {"vocab": int, "seed": int},
}
REQUIRED = {"random": "vocab"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which sources feed a drafter's trees. name: the text it was read from."""

    name: str
    parts: tuple[tuple[str, Settings], ...]

    @property
    def vocab_size(self) -> int:
        """Tokens that may be proposed without having been seen: 0 unless there is a source of random ones."""
        return max((settings["vocab"] for name, settings in self.parts if name == "random"), default=0)

    def memory(self) -> Successors:
        """What texts may share."""
        return Successors(dict(self.parts).get("recycling", {}).get("width", WIDTH))

    def source(self, law: DraftMode, shared: Successors) -> Source:
        """Sources for a new text.

        Under ratio tests (SAMPLED, GREEDY) a text must not read what other texts wrote: requests with one seed and id share their coins, so
        another's text tells of coins that are still to be used. Under matching nothing can bias, and memories are shared.
        """
        built = [self._part(name, settings, law, shared) for name, settings in self.parts]
        return built[0] if len(built) == 1 else Merged(built)

    def _part(self, name: str, settings: Settings, law: DraftMode, shared: Successors) -> Source:
        if name == "ngram":
            return Ngram(**settings)
        if name == "random":
            return RandomTokens(**settings)
        acceptance = {key: value for key, value in settings.items() if key == "acceptance"}
        if law in (DraftMode.TOP_K, DraftMode.COUPLED):
            return Recycling(shared, **acceptance)
        return Recycling(self.memory(), **acceptance, also=[shared])


def parse_recipe(spec: str) -> Recipe | None:
    """The recipe that a model setting names; None if it names something else (a folder, a hub name, a table).

    ValueError: a recipe with a mistake; the message is one line and says what to write.
    """
    parts = [part.partition(":") for part in spec.split("+")]
    if ":" not in spec or any(name not in KEYS for name, _, _ in parts):
        return None
    names = [name for name, _, _ in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"model: {spec!r} names a source twice; name each once")
    recipe = Recipe(spec, tuple((name, _settings(spec, name, text)) for name, _, text in parts))
    try:
        recipe.source(DraftMode.TOP_K, recipe.memory())
    except ValueError as wrong:
        raise ValueError(f"model: {spec!r}: {wrong}") from wrong
    return recipe


def _settings(spec: str, name: str, text: str) -> Settings:
    values: Settings = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in KEYS[name]:
            raise ValueError(f"model: {spec!r}: {name} has no setting {key!r}; use {', '.join(KEYS[name])}")
        try:
            values[key] = KEYS[name][key](value)
        except ValueError:
            raise ValueError(f"model: {key}={value!r} in {spec!r} is not a number") from None
    if (needed := REQUIRED.get(name)) is not None and needed not in values:
        raise ValueError(f"model: {spec!r} gives no {needed}; write for example {name}:{needed}=40")
    return values
