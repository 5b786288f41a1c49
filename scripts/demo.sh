#!/usr/bin/env bash
# Sets up, trains a network on handwritten digits, predicts with it and exports it to ONNX.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Shows a command as one would type it, and runs it.
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

All of it is in ${newest%/*}:

  summary.json      what was trained, and how well     best.pt      the network
  predictions.png   its mistakes (look at them)        model.onnx   the network for any runtime
                                                       model.md     a report on it

To go on by hand:

  source .venv/bin/activate
  python -m app.draw                             draw digits on a page: answers at every stroke
  python -m app.predict input=docs/pictures      or a picture of your own
  python -m app.train model.conv=depthwise       another network: --help shows what can be chosen
  tensorboard --logdir outputs                   the training curves
END
