#!/usr/bin/env bash
# Trains a small Llama on the text of Python's standard library, data parallel over two processes, and shows the result.
#
#   bash scripts/demo.sh [--short]
#
# --short trains only a few steps, which show that every part works.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

run=runs/demo overrides=()
case ${1:-} in
    "") ;;
    --short) run=runs/demo-short overrides=(train.steps=20 optim.warmup_steps=5 train.eval_every=20 checkpoint.every=20) ;;
    *) say "unknown argument $1; usage: demo.sh [--short]" && exit 2 ;;
esac

setup
nxtrain="$venv/bin/nxtrain"
rm -rf "$run"

say "=== training; dp=2, two processes that share every batch"
"$nxtrain" launch configs/demo.toml --nproc 2 "run.dir=$run" checkpoint.resume=never ${overrides[@]+"${overrides[@]}"}
say "=== export to Hugging Face, loaded by transformers, logits compared"
"$nxtrain" convert nxtrain-to-hf "$run" "$run/huggingface" --verify
prompt="    def __init__(self"
say "=== what it writes after \"$prompt\""
"$nxtrain" generate "$run" --prompt "$prompt" --max-new-tokens 120 --temperature 0.5
say "=== how it learned"
"$venv/bin/python" -m nxtrain.tools.report.loss_chart "$run"
say "=== its report: one HTML page, to be opened in a browser"
"$nxtrain" report "$run" >&2
say "=== done; the run folder is $run. Three commands to try next, in $PWD:"
say "$nxtrain generate $run --prompt class --max-new-tokens 120 --temperature 0.5"
say "$nxtrain launch configs/demo.toml run.name=mine data.source=text data.path=docs  # or your own text"
say "$venv/bin/tensorboard --logdir $run  # the curves, in a browser"
