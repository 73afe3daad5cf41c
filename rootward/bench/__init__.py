"""Measurements of the library that need models: `python -m rootward.bench.acceptance`.

contexts.py       positions in the target's own continuations of held-out prompts
noisy.py          a copy of a model with noise on its logits: a dial for mismatch
ranked.py         both models' rows in the draft's rank space, fetched for all contexts at once
lockstep.py       drives tree builders and growth over all contexts, one forward a level
constructions.py  the table of tree constructions and the rules that may verify them
calibrated.py     the shape that is optimal for measured acceptances
outcomes.py       the closed form of every rule on a tree, and verdicts drawn with fresh coins
grid.py           constructions × rules × budgets; levels.py: growth under a limit of draft forwards
results.py        what was measured, as values and JSON; tables.py, winners.py, plots.py: how it is shown
options.py, measuring.py, workers.py, acceptance.py: the command, its parts, its processes
lookup.py         drafters without a model, replayed on the target's own texts
distance.py       tokens/s against round-trip time, with the model of it (distance_model.py) drawn beside
drafters.py       sessions at one drafter against latency, use of growth, hits of growth ahead, bytes
generations.py, processes.py: sessions at once; services as processes on loopback
"""
