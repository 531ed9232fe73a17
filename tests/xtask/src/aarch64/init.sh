#!/bin/busybox sh
# The first program of the Arm machine: mounts the tree of the host under what is written here, and
# goes there.
set -e
busybox mount -t devtmpfs dev /dev
for module in /modules/*; do
    busybox insmod "$module"
done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose tree /lower
busybox mount -t tmpfs upper /upper
busybox mkdir /upper/data /upper/work
busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work root /root
busybox cp /start /jobs /root/
exec busybox switch_root /root /usr/bin/busybox sh /start
