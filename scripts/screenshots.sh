#!/bin/sh
# screenshots.sh PAGE: docs/pictures/report-wide.png (1,200 pixels wide) and report-phone.png (400) of a page that `report` made.
# DARK=1 and OUT=FOLDER make dark ones in another place. Needs Chromium, named by KVSMITH_CHROMIUM or found on PATH.
set -eu

page=$(realpath "${1:?usage: screenshots.sh PAGE}")
out=${OUT:-docs/pictures}
browser=${KVSMITH_CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -z "$browser" ]; then
    echo "error: no chromium, chromium-browser or google-chrome on PATH" >&2
    echo "hint: install Chromium, or name one in KVSMITH_CHROMIUM" >&2
    exit 1
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A window cannot be as narrow as a phone, so that the page is shown in a frame.
shot() { # name width height
    printf '<!doctype html><body style="margin:0;overflow:hidden"><iframe src="file://%s" style="border:0;width:%spx;height:%spx"></iframe>' \
        "$page" "$2" "$3" > "$folder/frame.html"
    "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$folder/profile" \
        ${DARK:+--blink-settings=preferredColorScheme=0} --window-size="$2,$3" --virtual-time-budget=4000 \
        --screenshot="$folder/$1" "$folder/frame.html" 2> "$folder/log" || { cat "$folder/log" >&2; exit 1; }
    mv "$folder/$1" "$out/$1"
}

shot report-wide.png 1200 1800
shot report-phone.png 400 2110
