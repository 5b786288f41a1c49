#!/usr/bin/env bash
# Installs Chromium for the tests of app.draw, where apt-get and its permission are at hand;
# without it these tests are skipped.
set -euo pipefail
if command -v chromium chromium-browser google-chrome >/dev/null; then
  exit
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  install() { apt-get install --yes --no-install-recommends chromium >/dev/null; }
  if install || { apt-get update >/dev/null && install; }; then
    exit
  fi
fi
printf 'no Chromium, which only root can install by apt-get: the tests in a browser are skipped\n'
