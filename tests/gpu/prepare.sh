#!/usr/bin/env bash
# Before GPU time on a machine without a package index: the wheels that an image with PyTorch, transformers and pytest
# lacks, 7.3 MiB, into .whl. For Python 3.12 on x86-64, with the versions of constraints.txt.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p .whl
rm -f .whl/*.whl
pinned() { grep -iE "^($1)==" constraints.txt; }
platforms=()
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d .whl $(pinned "hjson|megatron-core|pydantic|pydantic_core|annotated-types|typing-inspection")
# DeepSpeed has no wheel on PyPI.
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps -w .whl "$(pinned deepspeed)"
ls -l .whl
