#!/bin/sh
# Sees to a headless Chromium for the tests of `kvsmith report`. Without one those tests show as ignored.
set -eu

[ -n "${KVSMITH_CHROMIUM:-}" ] && exit 0
for program in chromium chromium-browser google-chrome; do
    command -v "$program" >/dev/null 2>&1 && exit 0
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium"
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null &&
        exit 0
fi
echo "note: no Chromium: the tests that open a report will be ignored" >&2
echo "hint: on Debian or Ubuntu: sudo apt-get install chromium" >&2
