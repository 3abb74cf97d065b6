#!/bin/sh
# A browser for the tests of the explorer: Debian's chromium, where there is none and where this may be installed.
# Never fails: without a browser those tests are skipped, and say why.
if command -v chromium > /dev/null || command -v chromium-browser > /dev/null; then
  echo "a browser is here"
elif [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "no browser, and none can be installed without root and apt-get"
else
  export DEBIAN_FRONTEND=noninteractive
  timeout 60 apt-get update -q && timeout 240 apt-get install -q -y --no-install-recommends chromium \
    || echo "chromium could not be installed"
fi
exit 0
