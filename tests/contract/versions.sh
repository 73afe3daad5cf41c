#!/usr/bin/env bash
# The contract suite against several releases of transformers, each in a virtual environment that is thrown away.
#
#   tests/contract/versions.sh [VERSION ...]     without arguments: the oldest allowed, the pinned and the latest release
#
# TORCH (a requirement) and TORCH_INDEX (options of pip) say which torch; PYTHON which interpreter. REPORTS=folder keeps a table each.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
pinned=$(sed -n 's/^transformers==//p' constraints.txt)
torch=${TORCH:-torch==$(sed -n 's/^torch==//p' constraints.txt)}
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(5.0.0 "$pinned" latest)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()
for version in "${versions[@]}"; do
    wanted="transformers==$version"
    [ "$version" != latest ] || wanted="transformers>=5,<6"
    "$python" -m venv "$work/venv" --clear
    pip=("$work/venv/bin/python" -m pip install -qq --disable-pip-version-check)
    # shellcheck disable=SC2206  # several options. An index that does not answer must not cost minutes: one short try
    index=(${TORCH_INDEX:-})
    [ ${#index[@]} -gt 0 ] && "${pip[@]}" --retries 0 --timeout 5 "${index[@]}" "$torch" || "${pip[@]}" "$torch"
    "${pip[@]}" "$torch" "$wanted" numpy pytest pytest-asyncio pytest-timeout
    found=$("$work/venv/bin/python" -c 'import transformers, torch; print(transformers.__version__, "torch", torch.__version__)')
    echo "== transformers $found ($version)"
    report=${REPORTS:+$REPORTS/transformers-${found%% *}.md}
    OMP_NUM_THREADS=1 PYTHONPATH=. ${report:+env REPORT="$report"} \
        "$work/venv/bin/python" -m pytest -q -p no:cacheprovider tests/contract || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
