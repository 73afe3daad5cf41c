"""Growth of draft trees: one family of strategies for services, tests and benchmarks (algorithms.md, sections 5, 6 and 10)."""

from rootward.core.growth.ahead import Ahead, AheadBudget, shared_order
from rootward.core.growth.growth import Growth, growth_of
from rootward.core.growth.strategies import BestFirst, Strategy, match_probabilities, strategy_of

__all__ = [
    "Ahead",
    "AheadBudget",
    "BestFirst",
    "Growth",
    "Strategy",
    "growth_of",
    "match_probabilities",
    "shared_order",
    "strategy_of",
]
