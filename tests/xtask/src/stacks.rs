//! File systems and what they stand on, as a guest makes them: each with what it takes to mount it
//! at `/mnt`, and to take it apart.

/// The disk that has room for any file system (mkfs.xfs wants 300 MiB), and a small one.
pub const LARGE_MIB: u32 = 384;
pub const SMALL_MIB: u32 = 64;
/// Persistent memory, with room for any file system too.
pub const PERSISTENT_MIB: u32 = 320;

/// A file system whose files can be read and written.
#[derive(Debug, Clone, Copy)]
pub struct Stack {
    /// What it is called.
    pub name: &'static str,
    /// Whether bytes of its files may go between disk and device memory: the pages of a request for
    /// direct I/O are those that the disk gets, unchanged, and once.
    pub tunnels: bool,
    /// Makes it of `$large` and `$small`, which are disks, or `$persistent`, with anything on them,
    /// and mounts it. Its files are made in `/mnt/d`.
    pub make: &'static str,
    /// After a file has been made, which is `$file`; it cannot be written then.
    pub seal: Option<&'static str>,
    /// Looks whether the file system is whole, unmounts it and takes it apart.
    pub remove: &'static str,
}

/// What the others begin with, for what stands on ext4.
const fn plain(name: &'static str, make: &'static str, remove: &'static str) -> Stack {
    Stack {
        name,
        tunnels: false,
        make,
        seal: None,
        remove,
    }
}

/// All of them.
pub const STACKS: &[Stack] = &[
    Stack {
        tunnels: true,
        ..plain(
            "ext4",
            "mkfs.ext4 -q -F $large && mount -t ext4 $large /mnt",
            "umount /mnt && fsck.ext4 -f -n $large",
        )
    },
    Stack {
        tunnels: true,
        ..plain(
            "xfs",
            "modprobe xfs && mkfs.xfs -q -f $large && mount -t xfs $large /mnt",
            "umount /mnt && xfs_repair -n $large",
        )
    },
    // Read and written by the processor, in the persistent memory itself.
    plain(
        "ext4, DAX",
        "mkfs.ext4 -q -F -b 4096 $persistent && mount -t ext4 -o dax=always $persistent /mnt && \
         is_dax",
        "umount /mnt && fsck.ext4 -f -n $persistent",
    ),
    plain(
        "xfs, DAX",
        "mkfs.xfs -q -f -m reflink=0 $persistent && mount -t xfs -o dax=always $persistent /mnt \
         && is_dax",
        "umount /mnt && xfs_repair -n $persistent",
    ),
    plain(
        "btrfs",
        "modprobe btrfs && mkfs.btrfs -q -f $large && mount -t btrfs $large /mnt",
        "umount /mnt",
    ),
    plain(
        "f2fs",
        "modprobe f2fs && mkfs.f2fs -q -f $large && mount -t f2fs $large /mnt",
        "umount /mnt",
    ),
    // Encrypted by the file system, in pages of its own.
    plain(
        "ext4, fscrypt",
        "mkfs.ext4 -q -F -O encrypt $large && mount -t ext4 $large /mnt && encrypt",
        "umount /mnt && fsck.ext4 -f -n $large",
    ),
    // Encrypted beneath the file system, in the pages of the request: the disk cannot do it itself.
    plain(
        "ext4, fscrypt, inlinecrypt",
        "mkfs.ext4 -q -F -O encrypt $large && mount -t ext4 -o inlinecrypt $large /mnt && encrypt",
        "umount /mnt && fsck.ext4 -f -n $large",
    ),
    Stack {
        seal: Some("fsverity enable $file"),
        ..plain(
            "ext4, fs-verity",
            "mkfs.ext4 -q -F -b 4096 -O verity $large && mount -t ext4 $large /mnt",
            "umount /mnt && fsck.ext4 -f -n $large",
        )
    },
    plain(
        "ext4 on dm-crypt",
        "modprobe dm_crypt && modprobe xts && \
         key=00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210 && \
         dmsetup create top --table \"0 $(blockdev --getsz $large) crypt aes-xts-plain64 $key 0 \
         $large 0\" && on_top",
        "off_top && dmsetup remove top",
    ),
    // The first table makes the superblock, which says how much room there is. What has no checksum
    // yet cannot be read.
    plain(
        "ext4 on dm-integrity",
        "modprobe dm_integrity && dd if=/dev/zero of=$small bs=4096 count=1 status=none && \
         rest=\"integrity $small 0 - D 1 internal_hash:crc32c\" && \
         dmsetup create top --table \"0 8 $rest\" && dmsetup remove top && \
         parts=$(($(od -An -t u8 -j 16 -N 8 $small) / 128)) && \
         dmsetup create top --table \"0 $((parts * 128)) $rest\" && \
         dd if=/dev/zero of=/dev/mapper/top bs=65536 count=$parts status=none && on_top",
        "off_top && dmsetup remove top",
    ),
    plain(
        "ext4 on dm-thin",
        "modprobe dm_thin_pool && dd if=/dev/zero of=$small bs=4096 count=1 status=none && \
         sectors=$(blockdev --getsz $large) && \
         dmsetup create pool --table \"0 $sectors thin-pool $small $large 128 0\" && \
         dmsetup message pool 0 'create_thin 0' && \
         dmsetup create top --table \"0 $sectors thin /dev/mapper/pool 0\" && on_top",
        "off_top && dmsetup remove top && dmsetup remove pool",
    ),
    // A volume that LVM has not made: what it is may change under it, and nothing says what it is
    // for.
    plain(
        "ext4 on dm-linear",
        "modprobe dm_mod && dmsetup create top --table \"0 $(blockdev --getsz $large) linear \
         $large 0\" && on_top",
        "off_top && dmsetup remove top",
    ),
    plain(
        "ext4 on a loop device over ext4",
        "modprobe loop && under && truncate -s 64M /under/image && losetup /dev/loop0 \
         /under/image && \
         mkfs.ext4 -q -F /dev/loop0 && mount -t ext4 /dev/loop0 /mnt",
        "umount /mnt && fsck.ext4 -f -n /dev/loop0 && losetup -d /dev/loop0 && not_under",
    ),
    plain(
        "overlayfs over ext4",
        "under && mkdir /under/lower /under/upper /under/work && \
         mount -t overlay -o lowerdir=/under/lower,upperdir=/under/upper,workdir=/under/work over \
         /mnt",
        "umount /mnt && not_under",
    ),
    // Without the daemons that would answer the server's questions: the answers are given before.
    // Flags: any port, no check of the path below, it has a number of its own.
    plain(
        "NFS of ext4",
        "under && echo 'nfsd 127.0.0.1 2147483647 here' >/proc/net/rpc/auth.unix.ip/channel && \
         echo 'here /under 2147483647 9218 -2 -2 0' >/proc/net/rpc/nfsd.export/channel && \
         echo 'here 1 \\x00000000 2147483647 /under' >/proc/net/rpc/nfsd.fh/channel && \
         mount -t nfs4 -o vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1 127.0.0.1:/ /mnt",
        "umount /mnt && echo 0 >/proc/fs/nfsd/threads && umount /proc/fs/nfsd && not_under",
    ),
];

/// What is begun before any of them: for its first seconds an NFS server opens files only for
/// clients that had them open before (RFC 8881, section 8.4.2.1).
pub const BEFORE: &str = "modprobe nfsd && modprobe nfsv4 && mount -t nfsd nfsd /proc/fs/nfsd && \
                          cd /proc/fs/nfsd && \
    echo 10 >nfsv4gracetime && echo '-3 +4' >versions && echo 'tcp 2049' >portlist && echo 1 \
    >threads";

/// What they have in common, as functions of the shell.
pub const FUNCTIONS: &str = "export DM_DISABLE_UDEV=1
    roots=$(sed 's/.*farlane.roots=\\([^ ]*\\).*/\\1/' /proc/cmdline)
    persistent=/dev/pmem$(echo $roots | tr , '\\n' | wc -l)
    is_dax() { grep -q '^[^ ]* /mnt .*dax=always' /proc/mounts; }
    encrypt() {
        mkdir /mnt/d && head -c 64 /dev/urandom >/tmp/key &&
        id=$(xfs_io -c add_enckey /mnt </tmp/key | sed 's/.* //') && xfs_io -c \"set_encpolicy -v \
        2 $id\" /mnt/d
    }
    on_top() { mkfs.ext4 -q -F /dev/mapper/top && mount -t ext4 /dev/mapper/top /mnt; }
    off_top() { umount /mnt && fsck.ext4 -f -n /dev/mapper/top; }
    under() { mkdir -p /under && mkfs.ext4 -q -F $large && mount -t ext4 $large /under; }
    not_under() { umount /under && fsck.ext4 -f -n $large; }";
