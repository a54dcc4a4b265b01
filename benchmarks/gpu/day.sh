#!/bin/bash
# Measures every exported network on one GPU: all compile at once, then they take the card one by one.
# Usage: benchmarks/gpu/day.sh FOLDER [ROWS] [WAY...]; FOLDER holds what benchmarks.gpu.export_hlo wrote.
set -eu
folder=$1 rows=${2:-benchmarks/rows}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "$0")/../.."
stems=$(cd "$folder" && ls ./*_xla.hlo.gz | sed 's/^..//; s/_xla.hlo.gz$//')
together=$(mktemp -d)
export XLA_PYTHON_CLIENT_MEM_FRACTION=.1 TF_CPP_MIN_LOG_LEVEL=2
for stem in $stems; do
  python3 -m benchmarks.gpu.run_hlo "$folder" "$stem" "$@" --rows "$rows" --seconds 20 \
    --together "$together" --processes "$(wc -w <<<"$stems")" >"$together/$stem.log" 2>&1 &
done
wait
cat "$together"/*.log
