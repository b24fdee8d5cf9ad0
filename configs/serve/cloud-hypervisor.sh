#!/bin/sh
# cloud-hypervisor with the slice vm1 of hugetlb.json or grace.json beside; kernel and initial root are the first two
# arguments. Written from cloud-hypervisor's documentation of --user-device: it was not run.
set -eu
# The server maps the machine's memory, so that has to be shared.
exec cloud-hypervisor --kernel "$1" --initramfs "$2" --cmdline "console=ttyS0" --serial tty --console off \
    --cpus boot=2 --memory size=1G,shared=on --user-device socket=/run/egm-serve/vm1.sock,id=egm0
