"""The command line of `rootward plan`, apart because shells complete it without loading torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="rootward plan",
        description="Will speculation pay? Starts services of the pair on this machine, measures them under load for about two minutes, "
        "and forecasts the speed-up by temperature, load and distance.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("target", metavar="TARGET", help="target model: folder, hub name or GGUF file")
    add("draft", metavar="DRAFT", help="draft model, folder of a draft head, or ngram (looked up in the text)")
    add("--prompts", type=Path, help="one prompt a line, or JSON lines with `text` (default: chat prompts of the demo)")
    add("--raw", action="store_true", help="prompts as they are, without the chat template of the target")
    add(
        "--rtt",
        type=float,
        default=0.0,
        help="round trip between verifier and drafter in ms, for a draft model (default 0)",
    )
    add("--load", type=int, default=8, help="most sessions at once (default 8)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default 0 1")
    add(
        "--nodes",
        type=int,
        default=16,
        help="most nodes of a round, as --num-draft-tokens of the verifier (default 16)",
    )
    add("--tokens", type=int, default=128, help="of each answer (default 128)")
    add(
        "--seconds",
        type=float,
        default=100.0,
        help="of measuring; start, loading and learning (128 rounds a load) not included",
    )
    add(
        "--threads",
        type=int,
        help="CPU threads of the target (default: all cores); a drafter has half as many, as in `serve all`",
    )
    add("--device", default="cpu", help="torch device (default cpu)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="default auto")
    add("--start-timeout-s", type=float, default=300.0, help="how long the services may take to start (default 300)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="picture with the curves: a .png, .svg or .pdf file (needs matplotlib)")
    add("--json", action="store_true", help="everything as one JSON object")
    return made
