#!/usr/bin/env bash
# Installs Chromium for the browser tests, as root with apt-get. Without Chromium they are skipped.
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
printf 'Chromium not found, and installing it needs root and apt-get: browser tests are skipped\n'
