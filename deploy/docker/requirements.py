"""`requirements.py EXTRA…`: their requirements, one a line, to be installed before our own code is there."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
for line in [*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra])]:
    print(line)
