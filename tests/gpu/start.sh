#!/usr/bin/env bash
# `make gpu`, where packages cannot be installed too: wheels that prepare.sh has put into .whl are unpacked aside.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-$(command -v python || command -v python3)}
if compgen -G ".whl/*.whl" >/dev/null; then
    site=$(mktemp -d)/site
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
# A host name that no server answers for costs gloo and torchrun seconds at each start.
host=$(hostname)
getent hosts "$host" >/dev/null || { [ -w /etc/hosts ] && echo "127.0.0.1 $host" >>/etc/hosts; } || true
exec "$python" -m tests.gpu.session "$@"
