#!/busybox sh
# /init of a test guest's first file system: lays the read-only file systems in its memory over each other, a tmpfs for what
# it writes on top, and goes on in them. "farlane.roots" is how many there are, the topmost first.
/busybox mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module; done
roots=$(sed 's/.*\bfarlane\.roots=\([0-9]*\).*/\1/' /proc/cmdline)
last=/dev/pmem$((roots - 1))
i=0
# The kernel finds its persistent memory beside what is done here.
until [ -b $last ]; do
    i=$((i + 1))
    [ $i -lt 10000 ] || { echo "There is no $last" >/dev/console; poweroff -f; }
    usleep 1000
done
lower=
i=0
while [ $i -lt $roots ]; do
    mkdir /root$i
    mount -t erofs -o ro /dev/pmem$i /root$i
    lower=$lower:/root$i
    i=$((i + 1))
done
mkdir /writes
mount -t tmpfs writes /writes
mkdir /writes/upper /writes/work
mount -t overlay -o lowerdir=${lower#:},upperdir=/writes/upper,workdir=/writes/work root /root
# Without /proc the shell finds no other program of busybox than by its path.
for folder in dev proc; do /busybox mount -o move /$folder /root/$folder; done
exec /busybox switch_root /root /sbin/init
