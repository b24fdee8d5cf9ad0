#!/bin/sh
# Init of the lab's emulated host (L1), run by busybox: makes the machine usable, lets the runner run the scenarios
# that the shared directory asks for, and powers off. Logs and results stay in the shared directory.
export PATH=/bin:/run/tools HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
while read -r module; do
    insmod "/egm/modules/$module"
done < /egm/modules/order
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /root
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t debugfs debugfs /sys/kernel/debug
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose lab /share
# An interrupted power-off must not end in a kernel panic: whatever happens below, the machine goes off.
trap 'sync; umount /share; poweroff -f' EXIT
ip link set lo up
# Guest memory is a memfd: without this every 4 KiB of it is a nested page fault of its own. Not every kernel has it.
echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
# Programs run from memory: the shared directory has no shared mappings and no Unix sockets.
mkdir -p /run/tools
cp -r /share/tools/. /run/tools
echo "egm-lab: the emulated host is up after $(cut -d' ' -f1 /proc/uptime) s"
# An EGM device reports its retired pages to the program that opens it; the ledger and every plan have them from then on.
for region in /sys/class/egm/*; do
    [ ! -e "$region" ] || egm-device carve grant --region "${region##*/}" --size 2MiB -- true 2>&1 | cat
done
# Its split, and the part that is persistent memory as a device-DAX device: what "ndctl create-namespace -m devdax" does.
mkdir -p /etc/egm-device/host
cp "/run/tools/configs/host/lab-$(uname -m).json" /etc/egm-device/host/ 2> /dev/null
dax=/sys/bus/nd/devices/dax0.0
if [ -e "$dax" ]; then
    echo namespace0.0 > /sys/bus/nd/drivers/nd_pmem/unbind
    echo ram > $dax/mode
    echo 2097152 > $dax/align
    cat /proc/sys/kernel/random/uuid > $dax/uuid
    echo namespace0.0 > $dax/namespace
    echo dax0.0 > /sys/bus/nd/drivers/dax_pmem/bind
fi
# The other part is a file system that maps it directly: an image, because busybox makes none with a journal.
pmem=/dev/pmem1
if [ -e "$pmem" ]; then
    zcat /egm/pmem.ext4.gz > "$pmem"
    mkdir -p /mnt/pmem
    mount -t ext4 -o dax "$pmem" /mnt/pmem && mkdir -m 0700 /mnt/pmem/egm
fi
# The first device of a region that can be split gives up its memory, which leaves all of it to the devices of slices.
for device in /sys/bus/dax/devices/*; do
    [ ! -e "$device/../dax_region/create" ] || [ "$(cat "$device/size")" = 0 ] || echo 0 > "$device/size"
done
# Properties that a Grace host's firmware sets for a function: its socket, and that its GPU is ready (link and memory
# trained). All of BAR 0 of QEMU's display is memory, so this state is written there. Other GPUs get ready by themselves.
for function in /sys/bus/pci/devices/*; do
    if [ -e "$function/of_node/numa-node-id" ]; then
        printf '%d\n' "0x$(od -An -tx1 "$function/of_node/numa-node-id" | tr -d ' ')" > "$function/numa_node"
    fi
    if [ -e "$function/of_node/nvidia,gpu-mem-size" ]; then
        if [ "$(cat "$function/vendor")" = 0x1234 ]; then
            echo 1 > "$function/enable"
            bar0=$(head -n 1 "$function/resource" | cut -d' ' -f1)
            for ready in 0x1498 0x200bc; do
                devmem $((bar0 + ready)) 32 0xff
            done
        fi
        [ ! -e "$function/driver" ] || echo "${function##*/}" > "$function/driver/unbind"
        echo nvgrace_gpu_vfio_pci > "$function/driver_override"
        echo "${function##*/}" > /sys/bus/pci/drivers_probe
        echo "${function##*/} is a Grace GPU, its driver is $(basename "$(readlink "$function/driver")")"
    fi
done
# The functions that guests get, by vendor and device (nvme, igb, e1000e, edu, ivshmem, and the lab's own GPUs and network
# card), go to vfio-pci.
for function in /sys/bus/pci/devices/*; do
    case $(cat "$function/vendor" "$function/device" | tr -d '\n') in
    0x1b360x0010 | 0x80860x10c9 | 0x80860x10d3 | 0x12340x11e8 | 0x1af40x1110 | 0x10de0x2335 | 0x15b30x1019)
        [ ! -e "$function/driver" ] || echo "${function##*/}" > "$function/driver/unbind"
        echo vfio-pci > "$function/driver_override"
        echo "${function##*/}" > /sys/bus/pci/drivers_probe
        # QEMU (11.1) does not reset a function that returns from D3hot, although No_Soft_Reset is 0. Without a bus of
        # its own the function has no reset but that of the whole bus.
        case $(cat "$function/reset_method" 2> /dev/null) in
        pm*) [ -e "${function%.*}.1" ] && echo > "$function/reset_method" || echo bus > "$function/reset_method" ;;
        esac
        echo "${function##*/} is in group $(basename "$(readlink "$function/iommu_group")")," \
            "its driver is $(basename "$(readlink "$function/driver")")"
        ;;
    esac
done
# The network card that is at one hub with those of the guests.
hub=$(grep -l 52:54:00:e9:00:01 /sys/class/net/*/address | cut -d/ -f5)
ip address add 192.168.101.1/24 dev "$hub"
ip link set "$hub" up
run() {
    if [ -e /share/command ]; then
        sh /share/command
    else
        # shellcheck disable=SC2046 # one argument a line, none with spaces
        /run/tools/egm-lab $(cat /share/arguments)
    fi
    echo $? > /share/exit
}
cd /root || exit
if grep -qw lab.shell /proc/cmdline; then
    setsid cttyhack sh -l
elif grep -qw lab.console /proc/cmdline; then
    setsid cttyhack sh /share/command
    echo $? > /share/exit
else
    # Through a pipe: on a terminal the runner would draw.
    run 2>&1 | cat
fi
