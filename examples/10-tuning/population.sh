#!/usr/bin/env bash
# Population-based training of a recipe: the worst take over the best one's weights and settings after every epoch.
#
#     bash population.sh [--trials 4 --epochs 3 ...]
#
# Settings that the search finds this way change on the way; trials.json holds who took over from whom, and when.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

phalanx tune digits --space "$here/space.toml" --metric val/accuracy --num-workers 1 \
    --scheduler pbt --trials 8 --epochs 6 --study-dir population "$@"
