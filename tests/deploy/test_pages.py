"""Examples in the pages for operators: the chart takes their values as they stand."""

import re

import pytest
import yaml
from support.helm import CHART, ROOT

PAGES = sorted((ROOT / "docs" / "operations").glob("*.md"))
CHARTS = set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def examples() -> dict[str, str]:
    """Every block of YAML that is made of the chart's values."""
    found = {}
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            if set(yaml.safe_load(block)) <= CHARTS:
                found[f"{page.stem}-{number}"] = block
    return found


def test_there_are_examples():
    assert len(examples()) >= 4


@pytest.mark.parametrize("name", examples())
def test_an_example_is_taken(helm, name):
    done = helm.template(examples()[name])
    assert done.returncode == 0, done.stderr
