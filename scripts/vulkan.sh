#!/bin/sh
# Sees to a Vulkan driver for the tests of `--device wgpu`: Mesa's, which needs no GPU. Without one those tests
# show as ignored.
set -eu

found() {
    for folder in /usr/share/vulkan/icd.d /etc/vulkan/icd.d /usr/local/share/vulkan/icd.d; do
        for file in "$folder"/*.json; do
            [ -e "$file" ] && return 0
        done
    done
    return 1
}

[ "$(uname)" = Linux ] || exit 0
[ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] && exit 0
found && exit 0

packages="libvulkan1 mesa-vulkan-drivers"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing $packages"
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null &&
        exit 0
fi
echo "note: no Vulkan driver: the tests of --device wgpu will be ignored" >&2
echo "hint: on Debian or Ubuntu: sudo apt-get install $packages" >&2
