"""Tree-speculative decoding as mathematics: trees, how they are drawn, and the law of what a verifier does with them.

    tree, draft = drafting.rsd_c(row, [2, 2], rng)
    law = verification.law("traversal", tree, target, draft)
    law.block_efficiency, law.stop, law.residual

Pure numpy and standard library; no state; randomness is always an argument.
"""

from rootward.core import drafting, verification
from rootward.core.law import VerificationLaw as Law
from rootward.core.tree import TokenTree

__all__ = ["Law", "TokenTree", "drafting", "verification"]
