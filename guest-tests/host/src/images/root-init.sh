#!/bin/sh
# Init of a guest with its root file system on the first disk: loads the modules and starts its init.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do
    insmod "/egm/modules/$module"
done < /egm/modules/order
# The kernel is quiet here, and the runner waits for its words.
echo "Run /sbin/init as init process"
mount -o rw /dev/vda /root && exec switch_root /root /sbin/init
echo "no root file system on /dev/vda"
poweroff -f
