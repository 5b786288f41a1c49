#!/usr/bin/env bash
# Sets up, trains a network on handwritten digits, predicts with it and exports it to ONNX.
set -euo pipefail
if [ $# -gt 0 ]; then
  printf 'usage: scripts/demo.sh\n' >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Prints a command and runs it.
run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run python -m app.train model.act=ncrelu
run python -m app.predict
run python -m app.export_onnx

# shellcheck disable=SC2012 # our own names: dates and times
newest=$(ls -t outputs/*/*/model.onnx | head -n 1)
cat <<END

The run's files are in ${newest%/*}:

  summary.json      configuration and accuracy     best.pt      checkpoint
  predictions.png   test images, mistakes first    model.onnx   exported network
                                                   model.md     its model card
  model-standard.onnx and its card                 for runtimes other than ONNX Runtime

Next steps:

  source .venv/bin/activate
  python -m app.draw                             draw digits in the browser
  python -m app.predict input=docs/pictures      predict pictures, or a picture of your own
  python -m app.train model.conv=depthwise       train another network (options: --help)
  tensorboard --logdir outputs                   show the training curves
END
