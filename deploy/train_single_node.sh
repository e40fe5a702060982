#!/bin/bash
# Train on all GPUs of one machine; any argument of `phalanx train` may follow:
#   deploy/train_single_node.sh text --epochs 100 --batch-size 32 --learning-rate 0.001
#   deploy/train_single_node.sh --script train.py --num-workers 4 -- --num-epochs 100
set -euo pipefail
cd "${WORK:-$PWD}"                         # where the run folder is written
program="${PROGRAM:-phalanx}"              # of another environment: /opt/phalanx/bin/phalanx

if [ "$#" -eq 0 ]; then
  set -- text                              # the recipe, when nothing else is given
fi
# Started again after exit code 75 (saved), it continues from the last checkpoint.
run="${RUN_DIR:-runs/single-node}"
exec "$program" train --run-dir "$run" --checkpoint-dir "$run/checkpoints" --resume-from-checkpoint=true "$@"
