#!/busybox sh
# /init of a test guest's first file system: lays the read-only file systems in its memory over each other, a tmpfs for what
# it writes on top, and goes on in them. "farlane.roots" has the names of their devices, the topmost first: persistent
# memory, or disks.
/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module; done
roots=$(sed 's/.*\bfarlane\.roots=\([^ ]*\).*/\1/; s/,/ /g' /proc/cmdline)
lower=
i=0
for device in $roots; do
    # The kernel finds its devices beside what is done here.
    until [ -b /dev/$device ]; do
        i=$((i + 1))
        [ $i -lt 10000 ] || { echo "There is no /dev/$device" >/dev/console; poweroff -f; }
        usleep 1000
    done
    mkdir /root-$device
    mount -t erofs -o ro /dev/$device /root-$device
    lower=$lower:/root-$device
done
mkdir /writes
mount -t tmpfs writes /writes
mkdir /writes/upper /writes/work
mount -t overlay -o lowerdir=${lower#:},upperdir=/writes/upper,workdir=/writes/work root /root
# Without /proc the shell finds no other program of busybox than by its path.
for folder in dev proc; do /busybox mount -o move /$folder /root/$folder; done
exec /busybox switch_root /root /sbin/init
