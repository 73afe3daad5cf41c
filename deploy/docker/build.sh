#!/usr/bin/env bash
# Builds both images without a Docker engine, with buildah; without a registry on a base of debootstrap's.
#
#   deploy/docker/build.sh [slim|worker ...]      images rootward/slim:TAG, rootward/worker:TAG, and OUT/TARGET.oci.tar if OUT is set
#
# BASE: base image (default: python:3.11-slim from the registry; "debootstrap" makes one from Debian's packages)
# TAG (default: the version in pyproject.toml), MIRROR (of Debian), FLAGS (more of buildah's, as --volume /etc/pip.conf:/etc/pip.conf:ro)
set -euo pipefail
cd "$(dirname "$0")/../.."
TAG=${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
BASE=${BASE:-docker.io/library/python:3.11-slim}
ISOLATION=${ISOLATION:-chroot}

if [ "$BASE" = debootstrap ]; then
  BASE=localhost/rootward-base:bookworm
  if ! buildah inspect "$BASE" >/dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}"
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc "$root"/usr/share/man
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$root" /
    buildah commit --quiet --rm "$container" "$BASE"
  fi
fi

for target in "${@:-slim worker}"; do
  for one in $target; do
    # --timestamp 0: the same input gives the same image
    buildah bud --isolation "$ISOLATION" --layers --timestamp 0 --build-arg "BASE=$BASE" ${FLAGS:-} \
      --target "$one" --tag "rootward/$one:$TAG" --file deploy/docker/Dockerfile .
    if [ -n "${OUT:-}" ]; then
      mkdir -p "$OUT"
      rm -f "$OUT/$one.oci.tar"
      buildah push --quiet "rootward/$one:$TAG" "oci-archive:$OUT/$one.oci.tar:rootward/$one:$TAG"
    fi
  done
done
