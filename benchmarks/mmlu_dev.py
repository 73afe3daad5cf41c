"""A task for lm-evaluation-harness without a data set from a hub: the development questions of MMLU, which lie in the package `lm_eval`.

python benchmarks/mmlu_dev.py FOLDER    # by the Python that has lm_eval; then: lm_eval --include_path FOLDER --tasks mmlu_dev
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import lm_eval
import yaml

PROMPTS = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "flan_cot_fewshot"
QUESTION = re.compile(r"(.*?)\s*\(A\) (.*?)\s*\(B\) (.*?)\s*\(C\) (.*?)\s*\(D\) (.*)", re.DOTALL)
ANSWER = re.compile(r"answer is \(([ABCD])\)")
METRICS = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]


def questions() -> list[dict[str, object]]:
    """The questions with four choices and a plain answer, each once."""
    found: dict[str, dict[str, object]] = {}
    for path in sorted(PROMPTS.glob("mmlu_*.yaml")):
        for sample in yaml.safe_load(path.read_text(encoding="utf-8"))["fewshot_config"]["samples"]:
            asked, answer = QUESTION.fullmatch(sample["question"].strip()), ANSWER.search(sample["target"])
            if asked and answer:
                question, *choices = (" ".join(part.split()) for part in asked.groups())
                found[question] = {"question": question, "choices": choices, "answer": "ABCD".index(answer[1])}
    return list(found.values())


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.resolve() / "mmlu_dev.jsonl"
    rows = questions()
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "mmlu_dev",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 0,
        "metric_list": METRICS,
    }
    (folder / "mmlu_dev.yaml").write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
    print(f"{len(rows)} questions in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
