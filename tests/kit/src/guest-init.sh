#!/bin/busybox sh
# /sbin/init of a test guest: mounts what programs expect, brings the wire up, and runs the agent. Everything else is done
# by commands that the VM kit sends to the agent.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
mount -t sysfs sys /sys
mkdir -p /dev/shm /dev/pts
mount -t devpts pts /dev/pts
for folder in /dev/shm /tmp /run; do mount -t tmpfs tmpfs $folder; done
ulimit -l unlimited
ulimit -n 65536
ip link set lo up

parameter() { sed -n "s/.*\bfarlane\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

hostname "$(parameter name)"
address=$(parameter address)
if [ -n "$address" ]; then
    # Loading the driver probes the device: the interface is there when modprobe returns.
    modprobe virtio_net
    ip link set eth0 up
    ip address add "$address" dev eth0
fi
user=$(parameter user)
if [ -n "$user" ]; then
    modprobe virtio_net
    ip link set "${user%%:*}" up
    ip address add "${user#*:}" dev "${user%%:*}"
fi
if [ -e /usr/lib/farlane/farlane.ko ]; then
    insmod /usr/lib/farlane/farlane.ko
fi
if [ -n "$(parameter shell)" ]; then
    setsid sh -c 'exec sh -l </dev/ttyS0 >/dev/ttyS0 2>&1'
    poweroff -f
fi
/usr/sbin/farlane-vm-agent
echo "The agent has ended with status $?" >&2
poweroff -f
