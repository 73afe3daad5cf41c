"""Drafting without a model: trees from what was seen before.

A `Source` names likely next tokens with a score; `extend_tree` makes a living tree of them, best paths first. Nothing is drawn: a tree is
a deterministic function of the text so far, so every node is *chosen*. Target matching may verify it, and so may the ratio tests, with
one-hot laws (algorithms.md, section 4).

| source | names | after |
|---|---|---|
| Ngram | what followed the longest suffix of the text that has occurred before, then shorter ones | prompt lookup |
| Recycling | the last successors of a token, over all texts of a memory | Token Recycling, 2408.08696 |
| Prediction | the continuation of a given text, aligned again after a difference | predicted outputs |
| RandomTokens | anything | tests of exactness |
| Merged | what several sources name, each token once, best score first | |
"""

from __future__ import annotations

from rootward.core.drafting.lookup.automaton import SuffixAutomaton
from rootward.core.drafting.lookup.ngram import Ngram
from rootward.core.drafting.lookup.paths import Shape, best_path, extend_tree
from rootward.core.drafting.lookup.prediction import Prediction
from rootward.core.drafting.lookup.random_tokens import RandomTokens
from rootward.core.drafting.lookup.recipe import Recipe, parse_recipe
from rootward.core.drafting.lookup.recycling import Recycling, Successors
from rootward.core.drafting.lookup.source import Candidate, Merged, Source

__all__ = [
    "Candidate",
    "Merged",
    "Ngram",
    "Prediction",
    "RandomTokens",
    "Recipe",
    "Recycling",
    "Shape",
    "Source",
    "Successors",
    "SuffixAutomaton",
    "best_path",
    "extend_tree",
    "parse_recipe",
]
