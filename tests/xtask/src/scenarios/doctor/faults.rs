//! Faults as lines of the shell, each for a mount namespace of its own in the room: what it mounts
//! goes with it.

/// The exit status of a line where this machine has no place for the fault.
pub const NOT_HERE: i32 = 77;

/// The program.
const DOCTOR: &str = "/opt/farlane";

/// A fault.
pub struct Fault {
    /// What `farlane doctor` calls it, and how bad it is.
    pub name: &'static str,
    pub level: &'static str,
    /// What it is.
    pub about: &'static str,
    /// What is made ready before, which is no fault yet.
    pub ready: &'static str,
    /// What makes it.
    pub make: &'static str,
    /// By what the program is started then.
    pub through: &'static str,
}

impl Fault {
    const fn new(
        (name, level): (&'static str, &'static str),
        about: &'static str,
        ready: &'static str,
        make: &'static str,
    ) -> Self {
        Self {
            name,
            level,
            about,
            ready,
            make,
            through: "",
        }
    }

    const fn through(self, through: &'static str) -> Self {
        Self { through, ..self }
    }

    /// What a shell is told to have no fault, and to have it.
    pub fn lines(&self) -> [String; 2] {
        let Self {
            ready,
            make,
            through,
            ..
        } = self;
        [
            format!("{ready}\n{DOCTOR} doctor --json"),
            format!("{ready}\n{make}\n{through} {DOCTOR} doctor --json"),
        ]
    }
}

/// The names that this machine may have of itself.
pub const MACHINES: &[&str] = &[
    "bpf",
    "hugepages",
    "io-uring",
    "iommu",
    "max-map-count",
    "memlock",
    "shared-memory",
    "vfio-group",
    "vfio-rights",
];

/// A QEMU in front of the room's own, which answers --version as $1 says and lists devices but for
/// $2.
const QEMU: &str = r#"qemu() {
    mkdir -p /tmp/qemu && mount -t tmpfs qemu /tmp/qemu
    cat >/tmp/qemu/qemu-system-x86_64 <<END
#!/bin/sh
case \$1 in
    --version) exec $1 ;;
    *) /usr/bin/qemu-system-x86_64 "\$@" | grep -v '$2' ;;
esac
END
    chmod +x /tmp/qemu/qemu-system-x86_64
    PATH=/tmp/qemu:$PATH
}
qemu '/usr/bin/qemu-system-x86_64 --version' nothing-of-that-name"#;

/// IOMMU groups in place of this machine's own: a function of the group 7 is VFIO's.
const GROUPS: &str = r#"groups=/sys/kernel/iommu_groups
[ -d $groups ] || exit 77
function() {
    mkdir -p $groups/$1/devices/$2
    echo 0x010802 >$groups/$1/devices/$2/class
    ln -s ../../../../../bus/pci/drivers/$3 $groups/$1/devices/$2/driver
}
mount -t tmpfs groups $groups
mkdir -p /dev/vfio
mount -t tmpfs vfio /dev/vfio
function 3 0000:00:1f.0 lpc_ich
function 7 0000:01:00.0 vfio-pci
: >/dev/vfio/7"#;

/// A backend that listens, and a user of libvirt, who may connect.
const SOCKET: &str = r#"folder=/run/farlane
mkdir -p $folder
mount -t tmpfs run $folder
mkdir $folder/blk
socket=$folder/blk/vm0.sock
truncate -s 1M $folder/disk
/opt/farlane-blk --socket-path $socket --path $folder/disk </dev/null >/dev/null 2>&1 &
backend=$!
until grep -q " 00010000 .*$socket\$" /proc/net/unix; do
    kill -0 $backend || exit 1
    sleep 0.05
done
chmod 0666 $socket
cp /etc/passwd /tmp/passwd
echo libvirt-qemu:x:64055:64055::/:/bin/false >>/tmp/passwd
mount --bind /tmp/passwd /etc/passwd"#;

/// A process that finds our libraries, with the file of the packages.
const VERBS: &str = r#"export FARLANE_SOCKET=/run/farlane.sock LD_LIBRARY_PATH=/opt/verbs
mkdir -p /dev/infiniband
mount -t tmpfs infiniband /dev/infiniband
ln -s /dev/null /dev/infiniband/farlane0"#;

/// All of them.
pub fn all() -> Vec<Fault> {
    let problem = |name| (name, "problem");
    let note = |name| (name, "note");
    vec![
        Fault::new(problem("qemu-missing"), "no QEMU in PATH", "", "PATH=/opt"),
        Fault::new(
            problem("qemu-version"),
            "QEMU 6.2",
            QEMU,
            "qemu 'echo QEMU emulator version 6.2.0' nothing-of-that-name",
        ),
        Fault::new(
            problem("qemu-version"),
            "a QEMU that tells endlessly",
            QEMU,
            "qemu yes nothing-of-that-name",
        ),
        Fault::new(
            note("qemu-devices"),
            "a QEMU without vfio-user",
            QEMU,
            "qemu '/usr/bin/qemu-system-x86_64 --version' vfio-user-pci",
        ),
        Fault::new(
            note("shared-memory"),
            "a /dev/shm of 64 MiB",
            "mount -t tmpfs -o size=2G shm /dev/shm",
            "mount -t tmpfs -o size=64M shm /dev/shm",
        ),
        Fault::new(
            note("shared-memory"),
            "a /dev/shm that is no tmpfs",
            "mount -t tmpfs -o size=2G shm /dev/shm",
            "mount --bind /proc /dev/shm",
        ),
        Fault::new(
            problem("memlock"),
            "64 KiB that may be locked",
            "ulimit -l 8192 || exit 77",
            "ulimit -l 64",
        ),
        Fault::new(
            problem("max-map-count"),
            "1000 mappings",
            "count=/proc/sys/vm/max_map_count
             echo 65530 >/tmp/count && mount --bind /tmp/count $count",
            "echo 1000 >/tmp/count",
        ),
        Fault::new(
            note("hugepages"),
            "no free huge page",
            "pages=/sys/kernel/mm/hugepages
             [ -d $pages ] || exit 77
             mount -t tmpfs pages $pages
             mkdir $pages/hugepages-2048kB
             echo 8 >$pages/hugepages-2048kB/nr_hugepages
             echo 1 >$pages/hugepages-2048kB/free_hugepages",
            "echo 0 >$pages/hugepages-2048kB/free_hugepages",
        ),
        Fault::new(
            note("iommu"),
            "no IOMMU",
            GROUPS,
            "mount -t tmpfs groups $groups",
        ),
        Fault::new(
            problem("vfio-group"),
            "an IOMMU group of two drivers",
            GROUPS,
            "function 7 0000:01:00.1 nvme",
        ),
        Fault::new(
            problem("vfio-rights"),
            "an IOMMU group without a file",
            GROUPS,
            "rm /dev/vfio/7",
        ),
        Fault::new(
            problem("io-uring"),
            "io_uring switched off",
            "switch=/proc/sys/kernel/io_uring_disabled
             [ -f $switch ] || exit 77
             echo 0 >/tmp/switch && mount --bind /tmp/switch $switch",
            "echo 2 >/tmp/switch",
        ),
        Fault::new(
            note("bpf"),
            "no CAP_BPF",
            // Where everybody may, nothing is lacking.
            "[ \"$(cat /proc/sys/kernel/unprivileged_bpf_disabled)\" != 0 ] || exit 77",
            "",
        )
        .through("setpriv --bounding-set -bpf,-sys_admin"),
        Fault::new(
            problem("socket-stale"),
            "a backend that was killed",
            SOCKET,
            "kill -KILL $backend; wait $backend",
        ),
        Fault::new(
            problem("socket-rights"),
            "a socket of root's alone beside libvirt's user",
            SOCKET,
            "chmod 0600 $socket",
        ),
        Fault::new(
            problem("rdma-libraries"),
            "Debian's libibverbs in front",
            VERBS,
            "LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:$LD_LIBRARY_PATH",
        ),
        Fault::new(
            note("rdma-device-file"),
            "no file for UCX",
            VERBS,
            "rm /dev/infiniband/farlane0",
        ),
    ]
}
