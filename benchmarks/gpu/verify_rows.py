"""Verification of a tree against plain decoding: what the second and the 32nd row of a step cost at a 2 k context, 8 B shape.

A round is forward, verdict and commit, under the rule that the service uses (T = 0: matching; T = 1: traversal, with declared laws of
32 atoms); `forward_ratio` compares forwards alone. Trees are random and hardly ever accepted: the cost is that of their rows.

    python -m benchmarks.gpu.verify_rows --out verify_rows.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.measuring import (
    forward_times,
    head_of,
    parser,
    print_report,
    random_model,
    round_times,
    settle,
    spread,
)

WANTED, WIDTH = 1.15, 32
TARGET = "one session: a round of 32 rows at most 1.15 times a plain one at every temperature"
COLUMNS = ("sessions", "context", "temperature", "rows", "ms", "ratio", "forward_ms", "forward_ratio")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    options.add_argument("--context", type=int, default=2048)
    options.add_argument("--rows", type=int, nargs="+", default=[2, 8, 16, WIDTH, 64])
    args = options.parse_args(argv)
    settle(args, sessions=[1, 2], context=80, rows=[WIDTH])
    model = random_model(args, max_slots=max(args.sessions), max_len=2 * args.context)
    rows = []
    for sessions in args.sessions:
        about = {"sessions": sessions, "context": args.context}
        widths = [1, *args.rows]
        forward = {n: spread(forward_times(model, args, rows=n, **about))["ms"] for n in widths}
        for temperature in (0.0, 1.0):
            plain_ms = 0.0
            for n in widths:
                at = about | {"temperature": temperature}
                took = spread(round_times(model, args, rows=n, **at))
                plain_ms = plain_ms or took["ms"]
                ratios = {"ratio": took["ms"] / plain_ms, "forward_ratio": forward[n] / forward[1]}
                rows.append(at | {"rows": n} | took | {"forward_ms": forward[n]} | ratios)
    judged = [row["ratio"] for row in rows if row["sessions"] == 1 and row["rows"] == WIDTH]
    report = head_of(args, model, "verify rows", TARGET) | {
        "rows": rows,
        "reached": bool(judged) and max(judged) <= WANTED,
    }
    print_report(report, COLUMNS, args.out)
    return report


if __name__ == "__main__":
    main()
