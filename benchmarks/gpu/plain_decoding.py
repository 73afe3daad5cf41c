"""Plain decoding of an 8 B shape against the bandwidth floor: what a token costs, and what the weights alone would.

Floor = bytes that a step reads (weights and the KV of its contexts) / bandwidth of a large copy in the same run. A round is what the engine
runs for a token: forward, law, draw, commit; `forward` is the forward alone.

    python -m benchmarks.gpu.plain_decoding --out plain_decoding.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.large import weight_bytes_per_step
from benchmarks.gpu.measuring import (
    copy_bandwidth,
    forward_times,
    head_of,
    parser,
    print_report,
    random_model,
    round_times,
    settle,
    spread,
)

WANTED = 0.75  # of the floor's speed, at one session
TARGET = "one session: floor / time of a round at least 0.75 at every temperature"
COLUMNS = ("sessions", "context", "temperature", "ms", "forward_ms", "floor_ms", "fraction")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--context", type=int, default=512)
    args = options.parse_args(argv)
    settle(args, sessions=[1, 2], context=48)
    model = random_model(args, max_slots=max(args.sessions), max_len=2 * args.context)
    rate, weights = copy_bandwidth(args.device), weight_bytes_per_step(model.network)
    rows = []
    for sessions in args.sessions:
        floor_ms = (weights + sessions * args.context * model.memory.bytes_per_token) / rate * 1e3
        forward_ms = spread(forward_times(model, args, sessions=sessions, context=args.context, rows=1))["ms"]
        for temperature in (0.0, 1.0):
            at = {"sessions": sessions, "context": args.context, "temperature": temperature}
            took = spread(round_times(model, args, rows=1, **at))
            ours = {"forward_ms": forward_ms, "floor_ms": floor_ms, "fraction": floor_ms / took["ms"]}
            rows.append(at | took | ours)
    reached = all(row["fraction"] >= WANTED for row in rows if row["sessions"] == 1)
    measured = {"bandwidth_GB_s": rate / 1e9, "weight_bytes_read": weights, "rows": rows, "reached": reached}
    report = head_of(args, model, "plain decoding", TARGET) | measured
    print_report(report, COLUMNS, args.out)
    return report


if __name__ == "__main__":
    main()
