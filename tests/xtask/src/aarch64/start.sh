# Runs in the Arm machine what /jobs says, each with a result as cargo's tests have one, and switches
# it off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C

# Whether a test of this script's own has passed: its name, and 0 if so.
result() {
    if [ "$2" -eq 0 ]; then
        echo "test $1 ... ok"
        echo "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"
    else
        echo "test $1 ... FAILED"
        echo "test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"
    fi
}

# How many system calls the kernel has recorded as stopped by a filter (audit record 1326).
stopped() {
    dmesg | grep -c type=1326
}

# What the kernel says of itself when something is wrong with it.
complaints() {
    dmesg | grep -E 'BUG:|WARNING:|Oops|Internal error|blocked for more than'
}

# A program with tests: its package's folder, its path, and its words. Tests write beside their
# program, on a disk. One that does not end says no result, which is then missed.
run() {
    folder=$1
    shift
    echo "Running $*"
    cp "/programs/$(basename "$1")" "$1" && cd "$folder" || return
    timeout -k 5 "$JOB_SECONDS" "$@" </dev/null 2>&1 || echo "It ends with $?"
    rm "$1"
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tracefs trace /sys/kernel/tracing
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
echo 1 >/proc/sys/kernel/printk
modprobe -a virtio_blk ext4 loop tun veth
# Without its disk the machine says no result.
mount /dev/vda /tmp || busybox poweroff -f
chmod 1777 /tmp
ip link set lo up
. /jobs
complaints
result no_complaint_of_the_kernel $(($(complaints | wc -l) != 0))
busybox poweroff -f
