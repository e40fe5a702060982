#!/bin/bash
# Every step from a folder of images to an exported model. One machine, step by step:
#   bash run.sh pack | train | watch | evaluate | export
# A cluster; both write what they would submit, and submit it without RENDER:
#   RENDER=1 bash run.sh slurm | kubernetes
# The whole way without ImageNet and without a GPU, in some minutes: images are drawn, and everything is small:
#   SMALL=1 bash run.sh all
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
step="${1:-all}"
images="${IMAGES:-imagenet}"                # train/<class>/*.JPEG and val/<class>/*.JPEG
shards="${SHARDS:-imagenet-shards}"
run="${RUN:-runs/imagenet}"
render=(${RENDER:+--render})
machine=(--num-gpus 8)
size=()
if [ -n "${SMALL:-}" ]; then                # 32 pixels, ten classes, two CPU ranks
  machine=(--num-workers 2 --device cpu)
  size=(--set data.size=32 --set augment.crop=32 --set 'augment.scale=[0.5, 1.0]' --set model.preset=debug
        --set model.channels=3 --epochs 2 --batch-size 32 --learning-rate 0.2)
fi

pack() {                                    # run again after an interruption: only what is missing is written
  if [ -n "${SMALL:-}" ]; then
    phalanx data make shapes --out "$shards" --images 400 --val-images 80 --classes 10 --size 32
  else
    phalanx data pack "$images" --out "$shards" --shards 1024
  fi
  phalanx data info "$shards" --verify      # checksums
}

train() {                                   # run again after any end: it continues from the last checkpoint
  phalanx train "$here/imagenet.toml" --data "$shards" --run-dir "$run" --checkpoint-dir "$run/checkpoints" \
    --resume-from-checkpoint=true --metrics-port "${METRICS_PORT:-9400}" "${machine[@]}" "${size[@]}"
}

watch() {                                   # in another terminal, while it trains and after
  phalanx runs show "$run"
  phalanx report "$run"                     # where the time went
  phalanx ui "$run" --save "$run/report.html"
}

evaluate() {
  phalanx evaluate "$run" --json
}

export_model() {
  phalanx export "$run" --format safetensors -o "$run/model.safetensors"
}

slurm() {                                   # 4 machines of 8 GPUs; a preempted job is queued again and continues
  phalanx submit slurm "$here/imagenet.toml" --data "$shards" --num-nodes 4 --gpus-per-node 8 \
    --time-limit 24h --batch-size 64 "${render[@]}"
}

kubernetes() {                              # the image has the recipe "imagenet"; the settings of imagenet.toml are given here
  phalanx submit kubernetes imagenet --data /data/imagenet-shards --num-nodes 4 --gpus-per-node 8 --batch-size 64 \
    --ema-decay 0.9999 --checkpoint-frequency auto --max-restarts 10 --image "${IMAGE:-registry.example.com/phalanx:1}" \
    --pvc imagenet:/data,runs:/workspace/runs "${render[@]}"
}

case "$step" in
  pack | train | watch | evaluate | slurm | kubernetes) "$step" ;;
  export) export_model ;;
  all) pack; train; watch; evaluate; export_model; render=(--render); slurm; kubernetes ;;
  *) echo "run.sh: unknown step '$step'. Steps: pack, train, watch, evaluate, export, slurm, kubernetes, all" >&2; exit 2 ;;
esac
