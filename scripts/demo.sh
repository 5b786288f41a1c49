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

cat <<'END'

All of it is in the folder named above: the training curves, best.pt (the network), predictions.csv,
predictions.png (look at it) and model.onnx. To go on by hand:

  source .venv/bin/activate
  python -m app.predict input=picture.png        any picture of a digit, or a folder of them
  python -m app.train model.conv=depthwise       another network: --help shows what can be chosen
  tensorboard --logdir outputs                   the training curves
END
