#!/bin/sh
# Builds Horovod 0.28.1 for the TensorFlow in one virtual environment, once, and installs it there.
#
#   requirements/horovod.sh [VENV]        default .venv
#
# The wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/tf_ooo, one per Python and TensorFlow version.
# TensorFlow 2.15 and 2.18 take the released source as it is.  Later ones no longer ship the XLA headers
# that xla_mpi_ops.cc needs; the ops in it are off by default, so the file is left out for them.
set -eu

version=0.28.1
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "${1:-.venv}" && pwd)
python=$venv/bin/python
PATH=$venv/bin:$PATH
export PATH

say() { printf 'horovod: %s\n' "$*" >&2; }

for tool in cmake g++; do
    command -v "$tool" >/dev/null || { say "$tool not found; install it, then run 'make horovod' again"; exit 1; }
done

tag=$("$python" -c "import sys, importlib.metadata as m
names = {d.metadata['Name'].lower().replace('_', '-') for d in m.distributions() if d.metadata['Name']}
tf = next((n for n in ('tensorflow', 'tensorflow-cpu') if n in names), None)
if tf is None: sys.exit('horovod: TensorFlow not found in this environment; run make venv')
print(f'cp{sys.version_info[0]}{sys.version_info[1]}-{tf}-{m.version(tf)}')")
include=$("$python" -c "import importlib.util as u, os
print(os.path.join(os.path.dirname(u.find_spec('tensorflow').origin), 'include'))")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tf_ooo/horovod-$version-$tag

if ! ls "$cache"/*.whl >/dev/null 2>&1; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    say "building a wheel for $tag (some minutes, once)"
    "$python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation \
        --require-hashes -r "$here/horovod.txt" -d "$work"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    if [ ! -e "$include/tensorflow/compiler/xla/client/xla_builder.h" ]; then
        sed -i '/xla_mpi_ops\.cc/d' "$work/horovod-$version/horovod/tensorflow/CMakeLists.txt"
    fi
    if ! HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        "$python" -m pip wheel --no-deps --no-build-isolation \
        -w "$work/out" "$work/horovod-$version" >"$work/build.log" 2>&1; then
        tail -n 40 "$work/build.log" >&2
        say "the build failed; its last lines are above"
        exit 1
    fi
    mkdir -p "$cache"
    mv "$work"/out/*.whl "$cache"/
fi

"$python" -m pip install -q --no-deps --force-reinstall "$cache"/*.whl
