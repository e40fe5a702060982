#!/bin/bash
# Every step from texts to a model that answers. One machine, step by step:
#   bash run.sh corpus | pretrain | export | chats | tune | evaluate | ask | serve
# A cluster; both write what they would submit, and submit it without RENDER:
#   RENDER=1 bash run.sh slurm | kubernetes
# The whole way without a GPU, in some minutes: Python's own library is the corpus, and everything is small:
#   SMALL=1 bash run.sh all
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
step="${1:-all}"
texts="${TEXTS:-texts}"                     # .txt, .md, .jsonl or .parquet files
shards="${SHARDS:-./token-shards}"
chats="${CHATS:-chats}"                     # rows of messages, see docs/applications/fine-tuning.md
base="${BASE:-./base}"                      # a Hugging Face folder: the model to tune
runs="${RUNS:-runs}"
render=(${RENDER:+--render})
port="${PORT:-8000}"
machine=(--num-gpus 8)
vocabulary=32000
size=(--preset 1b)
tuned=(--lora-rank 16 --strategy fsdp)
if [ -n "${SMALL:-}" ]; then                # some hundred thousand parameters, two CPU ranks
  machine=(--num-workers 2 --device cpu)
  vocabulary=600
  size=(--set model.seq_len=128 --max-steps 40 --batch-size 8)
  tuned=(--lora-rank 8 --strategy fsdp --max-steps 40 --learning-rate 1e-2)
fi

corpus() {                                  # run again after an interruption: only what is missing is written
  if [ -n "${SMALL:-}" ]; then
    python - "$texts" <<'PYTHON'
import pathlib, shutil, sys, sysconfig
out = pathlib.Path(sys.argv[1])
out.mkdir(exist_ok=True)
for file in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]:
    shutil.copy(file, out / f"{file.stem}.txt")
PYTHON
  fi
  phalanx data tokenize "$texts" --out "$shards" --train-bpe "$vocabulary"
}

pretrain() {                                # run again after any end: it continues from the last checkpoint
  phalanx train llama --data "$shards" --set data.packing=documents "${size[@]}" "${machine[@]}" \
    --run-dir "$runs/pretrain" --checkpoint-dir "$runs/pretrain/checkpoints" --resume-from-checkpoint=true \
    --checkpoint-frequency auto --metrics-port "${METRICS_PORT:-9400}"
}

export_model() {                            # a folder that transformers reads as well
  phalanx export "$runs/pretrain" --format hf -o "$base"
}

chats() {                                   # a few thousand drawn ones; your own rows have the same form
  python "$here/make_chats.py" "$chats"
}

tune() {                                    # QLoRA: --lora-base nf4
  phalanx train sft --model "$base" --data "$chats/chats" --set data.template=plain "${tuned[@]}" "${machine[@]}" \
    --run-dir "$runs/tune" --checkpoint-dir "$runs/tune/checkpoints" --resume-from-checkpoint=true
}

evaluate() {                                # loss and perplexity on what was held out
  phalanx evaluate "$runs/pretrain" --json
  phalanx evaluate "$runs/tune" --json
}

ask() {
  phalanx predict "$runs/tune" --prompt "${QUESTION:-Who are you?}" --temperature 0 --max-tokens 40
}

serve() {
  phalanx serve "$runs/tune" --port "$port"
}

slurm() {                                   # a Llama 8B, adapters of its 4-bit weights, on 2 machines of 8 GPUs
  phalanx submit slurm sft --model "${FOLDER:-$base}" --data "$chats/chats" --set data.template=plain --lora-rank 16 --lora-base nf4 \
    --strategy fsdp --num-nodes 2 --gpus-per-node 8 --time-limit 12h "${render[@]}"
}

kubernetes() {                              # the pre-training, on claims for shards and runs
  phalanx submit kubernetes llama --data /data/shards --preset 1b --num-nodes 4 --gpus-per-node 8 \
    --checkpoint-frequency auto --max-restarts 10 --image "${IMAGE:-registry.example.com/phalanx:1}" \
    --pvc texts:/data,runs:/workspace/runs "${render[@]}"
}

case "$step" in
  corpus | pretrain | chats | tune | evaluate | ask | serve | slurm | kubernetes) "$step" ;;
  export) export_model ;;
  all) corpus; pretrain; export_model; chats; tune; evaluate; ask; render=(--render); slurm; kubernetes ;;
  *) echo "run.sh: unknown step '$step'. Steps: corpus, pretrain, export, chats, tune, evaluate, ask, serve, slurm, kubernetes, all" >&2
     exit 2 ;;
esac
