//! The list of all scenarios.

use farlane_kit::debian::{HEADERS_6_1, HEADERS_6_12};

use super::{
    Scenario, blk, blk_crash, blk_vs_qsd, book, cloud_hypervisor, doctor, driver_builds,
    driver_device, driver_kernels, gpu_coherence, gpu_hostile, gpu_p2pmem, gpu_raid, gpu_read,
    gpu_scan, gpu_soft, gpu_stacks, gpu_unmodified, gpu_write, kills, lend_crash, lend_hostile,
    lend_partition, lend_reassign, lend_soft, lend_vfio, lend_vs_local, libvirt, metrics,
    metrics_page, net_vs_tap, octo_net, octo_net_flood, octo_net_peers, octo_restart, octo_ssd,
    octo_ssd_failover, p2p_lent, package, rdma_apps, rdma_buffers, rdma_cm, rdma_crash, rdma_host,
    rdma_isolation, rdma_perftest, rdma_pingpong, rdma_pyverbs, rdma_stock, rdma_tenants,
    rdma_ulps, rdma_users, rdma_verbs, rdma_vs_rxe, rdma_workers, services, start, topology,
    tracing, vmkit,
};
use crate::versus::Form;

macro_rules! scenarios {
    (@is_test test) => { true };
    (@is_test long) => { false };
    ($($kind:ident $name:literal = $run:expr, $about:literal;)*) => {
        /// All scenarios, in the order in which a test run begins them: the longest first.
        pub const ALL: &[Scenario] = &[$(Scenario {
            name: $name,
            about: $about,
            is_test: scenarios!(@is_test $kind),
            run: $run,
        }),*];
    };
}

// `test`: `cargo xtask test` runs it; `long`: only `cargo xtask scenario` and `soak` do.
scenarios! {
    test "rdma-stock" = rdma_stock::run,
        "Debian's programs of verbs over the RDMA device of the guests' kernel, without a library \
         of ours: ibv_devinfo, rdma, ping-pongs, perftest";
    test "rdma-apps" = rdma_apps::run,
        "Debian's UCX, Open MPI, libfabric, fio and cmtime (10,000 connections) between two VMs \
         over the RDMA device of their kernels; the last three and QEMU's migration between \
         processes";
    test "rdma-ulps" = rdma_ulps::run,
        "NVMe over RDMA (a disk of farlane-blk, its VM killed), NFS over RDMA and RDS between two \
         VMs, by their kernels";
    test "rdma-crash" = rdma_crash::run,
        "kill -9 of programs, VMs and the backend in mid-transfer; resets, driver reloads, hot- \
         unplug and hot-plug";
    test "rdma-stock-crash" = rdma_crash::stock,
        "rdma-crash with programs that use the RDMA device of the guests' kernel";
    test "rdma-verbs" = rdma_verbs::run,
        "Debian's programs of verbs with every transport and operation (UC, UD, XRC, SRQ, atomics, \
         events), between two VMs and between two processes";
    test "rdma-crash-workers" = |run, to| rdma_workers::brief(rdma_crash::run, run, to),
        "rdma-crash with two worker threads, half as many kills";
    long "rdma-crash-workers-long" = |run, to| rdma_workers::whole(rdma_crash::run, run, to),
        "rdma-crash with two worker threads";
    test "rdma-cm" = rdma_cm::run,
        "Debian's programs of connections by addresses (rping, ucmatose, udaddy, mckey, cmtime, \
         rdma_server, perftest -R), between two processes, and between a VM and a process";
    test "rdma-perftest" = rdma_perftest::run,
        "perftest for send, write and read between two VMs: bandwidth at all sizes, latency at \
         single ones";
    test "rdma-pyverbs-stock" = rdma_pyverbs::stock,
        "rdma-core's own tests of verbs (Debian 13's) over the RDMA device of a guest's kernel";
    test "rdma-pyverbs-guest" = rdma_pyverbs::in_guest,
        "rdma-core's own tests of verbs, those of the guests' release, in a VM";
    test "rdma-tenants" = rdma_tenants::run,
        "a VM beside processes that attack it (large flows, 2,000 queue pairs, tiny and unaligned \
         writes, errors, storms of calls): right bytes, its share; a limit is kept";
    test "rdma-tenants-workers" = |run, to| rdma_workers::whole(rdma_tenants::run, run, to),
        "rdma-tenants with two worker threads";
    test "lend-hostile" = lend_hostile::run,
        "10,000 malformed vfio-user and lending messages each, and a guest that abuses its NVMe, \
         beside a VM with another";
    test "octo-ssd-failover" = octo_ssd_failover::run,
        "paths to a disk are pulled and returned at random under fio --verify: nothing lost, \
         nothing doubled, no error in the VM";
    test "topology" = topology::run,
        "a kernel with two NUMA nodes: what is shown of it, and memory that is found and followed";
    test "octo-net" = octo_net::run,
        "TCP and UDP flows whose endpoints migrate 1,000 times between nodes: no loss, hardly any \
         disorder, by the worker of their node";
    test "octo-net-flood" = |run, to| octo_net_flood::flood(run, 100_000, to),
        "3 * 10^5 distinct TCP flows through farlane-net fill its table: bounded memory, an \
         established flow keeps its queue and order";
    long "octo-net-flood-long" = |run, to| octo_net_flood::flood(run, 1_000_000, to),
        "octo-net-flood with 3 * 10^6 flows";
    long "kills" = kills::run,
        "a thousand kill -9 at random of the backends of a disk, an interface, RDMA and a lent \
         NVMe, all of them in use";
    test "lend-partition" = |run, to| lend_partition::partition(run, &[1], to),
        "two kernels: lender and borrower part with DMA under way, with a term of 1 s; nothing \
         lands after the lease's end";
    long "lend-partition-long" = |run, to| lend_partition::partition(run, &[1, 60], to),
        "lend-partition with terms of 1 s and of 60 s";
    test "octo-net-peers" = octo_net_peers::run,
        "iperf3, ping -f, curl, ssh, DHCP, IPv6, VLAN, jumbo frames, ethtool over farlane-net";
    test "gpu-unmodified" = gpu_unmodified::run,
        "grep, sha256sum, sqlite3 and fio --verify are the same with the I/O library; fio's \
         buffers in GPU memory";
    test "octo-restart" = octo_restart::run,
        "kill -9 of backends with workers on two nodes under load: nothing lost, nothing done \
         twice";
    test "lend-crash" = lend_crash::run,
        "kill -9 of borrower, VM and lender while a lent NVMe reads for fio; others go on, \
         nothing lands after a lease's end";
    test "octo-ssd" = octo_ssd::run,
        "one disk, two paths: every byte goes by the worker of its buffer's node; the kernel's \
         numa \
         multipath goes by the thread's";
    test "gpu-stacks" = gpu_stacks::run,
        "GPU memory and files on ext4, xfs, DAX, btrfs, f2fs, fscrypt, dm, loop, overlayfs, NFS: \
         right bytes, and which way";
    test "gpu-raid" = gpu_raid::run,
        "files on md RAID-0 and striped LVM go between two disks and GPU memory; on mirrors and \
         dm-crypt they do not";
    test "blk-crash" = blk_crash::run,
        "kill -9 of farlane-blk with requests in its hands, under fio --verify: nothing lost, \
         nothing completed twice";
    test "rdma-perftest-workers" = |run, to| rdma_workers::brief(rdma_perftest::run, run, to),
        "rdma-perftest with two worker threads, one size where that has all";
    long "rdma-perftest-workers-long" = |run, to| rdma_workers::whole(rdma_perftest::run, run, to),
        "rdma-perftest with two worker threads";
    test "rdma-host-workers" = |run, to| rdma_workers::brief(rdma_host::run, run, to),
        "rdma-host with two worker threads, one size where that has all";
    test "rdma-verbs-workers" = |run, to| rdma_workers::brief(rdma_verbs::on_host, run, to),
        "rdma-verbs between two processes, with two worker threads, one size where that has all";
    long "rdma-verbs-workers-long" = |run, to| rdma_workers::whole(rdma_verbs::run, run, to),
        "rdma-verbs with two worker threads";
    long "rdma-host-workers-long" = |run, to| rdma_workers::whole(rdma_host::run, run, to),
        "rdma-host with two worker threads";
    test "gpu-write" = gpu_write::run,
        "GPU memory is written to files, 1 B to 64 MiB, all alignments, 8 threads; the file \
         system stays whole";
    test "driver-builds" = driver_builds::run,
        "the guest driver builds for Linux 6.1, 6.12 and 7.x with each one's own compiler";
    test "doctor" = doctor::run,
        "farlane doctor finds each fault that is made in a container, and that alone; in a VM, the \
         missing module";
    test "book" = book::run,
        "the documents become a site by mdBook, each of whose links leads somewhere";
    test "metrics" = metrics::run,
        "Debian's Prometheus reads the metrics of all daemons; each query of the Grafana dashboard \
         has a series; farlane shows them in a table, and in a terminal (tmux)";
    test "metrics-page" = metrics_page::run,
        "the page beside the metrics in Debian's Chromium: plots of a disk that works agree with \
         the metrics, a name that is markup is text, a backend that is killed is named";
    test "tracing" = tracing::run,
        "Debian's bpftrace sees requests of a disk and of RDMA by the backends' static probes";
    test "libvirt" = libvirt::run,
        "libvirt and QEMU of Debian 12 and 13 with a disk and an interface of our packages: fio \
         and a transfer go on through kill -9 of the backends; virtiofs beside them; RDMA and a \
         borrowed NVMe with the QEMU of Debian 13's backports";
    test "package" = package::run,
        "the Debian packages in Debian 12 and 13: installed, upgraded, purged; units, profiles, \
         man pages, DKMS, libraries";
    test "services" = services::run,
        "Debian 13 with systemd as process 1 and AppArmor: the packages' units are connected to, \
         killed, restarted and stopped, and confined as their profiles say";
    test "start" = start::run,
        "the documents' lines for QEMU as they stand, with stock QEMU of Debian 12 and 13: a VM \
         starts from the disk, and reads and writes it";
    test "driver-6.1" = |run, to| driver_kernels::in_kernel(run, to, &HEADERS_6_1, "6.1."),
        "driver-device, rdma-pingpong, rdma-stock and a lent disk in guests with Linux 6.1";
    test "driver-6.12" = |run, to| driver_kernels::in_kernel(run, to, &HEADERS_6_12, "6.12."),
        "driver-device, rdma-pingpong, rdma-stock and a lent disk in guests with Linux 6.12";
    test "lend-reassign" = lend_reassign::run,
        "three VMs take turns with one lent NVMe, 20 rounds of hot-plug; then it is revoked from \
         one that uses it";
    test "rdma-isolation" = rdma_isolation::run,
        "forged handles, keys, addresses, indices and packets each get an error and hurt nobody";
    test "rdma-stock-isolation" = rdma_isolation::stock,
        "a hostile process with its own mapped queues of the RDMA device of a guest's kernel: an \
         error for all that it writes there, and nobody is hurt";
    test "rdma-isolation-workers" = |run, to| rdma_workers::whole(rdma_isolation::run, run, to),
        "rdma-isolation with two worker threads";
    test "rdma-buffers-workers" = |run, to| rdma_workers::whole(rdma_buffers::run, run, to),
        "rdma-buffers with two worker threads";
    test "lend-soft" = lend_soft::run,
        "a VM works with a lent NVMe and another one goes on with its files; memory by messages; \
         shared doorbells";
    test "gpu-soft" = gpu_soft::run,
        "a VM works with a lent GPU: video memory, copies, search, checksum, tiles; unplug; the \
         next VM";
    test "gpu-read" = gpu_read::run,
        "files are read into GPU memory, 1 B to 64 MiB, all alignments, 8 threads; bytes go past \
         the guest's memory";
    test "blk" = blk::run,
        "a VM works with disks of farlane-blk: ext4, fio --verify, discard, growth, read-only, \
         two queues";
    test "cloud-hypervisor" = cloud_hypervisor::run,
        "Cloud Hypervisor, where it is at hand: each backend in use, also after a pause, a reboot \
         of the guest and a kill -9";
    test "rdma-buffers" = rdma_buffers::run,
        "host-allocated buffers and callbacks: libfarlane's examples in C and Rust, and where \
         memory goes";
    test "rdma-host" = rdma_host::run,
        "rdma-pingpong's and rdma-perftest's programs between two processes of this machine, and \
         what is copied of memory that they share";
    test "rdma-users" = rdma_users::run,
        "ibverbs-utils' and perftest's programs between processes of two users of this machine";
    test "rdma-pyverbs" = rdma_pyverbs::run,
        "rdma-core's own tests of verbs (Debian's python3-pyverbs) over the daemon's host socket: \
         what passes, and why what does not is skipped";
    test "gpu-hostile" = gpu_hostile::run,
        "tokens forged, replayed, of another VM, after unregister, and memory unmapped in flight: \
         errors, and nothing else";
    test "lend-vfio" = lend_vfio::run,
        "two kernels: vfio-pci lends an NVMe, whose DMA goes through IOMMU and window into the \
         borrower's memory";
    test "gpu-p2pmem" = gpu_p2pmem::run,
        "reads and writes between SSDs and a PCI device's memory by peer-to-peer DMA, with and \
         without the library";
    test "gpu-scan" = gpu_scan::run,
        "a log scanner on plain pread finds planted addresses on the GPU; what is in no cache \
         never crosses the guest's memory";
    test "gpu-coherence" = gpu_coherence::run,
        "a process with the page cache and one with GPU memory see each other's writes in order, \
         with fsync and without";
    test "driver-device" = driver_device::run,
        "the guest driver lends out device memory only while it is mapped and the device is there";
    test "rdma-pingpong" = rdma_pingpong::run,
        "ibv_devinfo -v, and ibv_rc_pingpong polling, with events and with checked data, between \
         two VMs";
    test "rdma-pingpong-workers" = |run, to| rdma_workers::whole(rdma_pingpong::run, run, to),
        "rdma-pingpong with two worker threads";
    test "vmkit" = vmkit::run,
        "the VM kit itself: boot, commands, files, wire, hot-plug, and the end of a guest that \
         hangs";
    test "p2p-lent" = p2p_lent::run,
        "a lent NVMe reads and writes video memory of GPUs: same lender, own host, over the \
         network; unplug meanwhile";
    test "blk-vs-qsd" = |run, to| blk_vs_qsd::versus(run, Form::Small, to),
        "fio on a disk of farlane-blk and on one of qemu-storage-daemon, in one VM, in turns \
         (small form)";
    long "blk-vs-qsd-long" = |run, to| blk_vs_qsd::versus(run, Form::Long, to),
        "fio on a disk of farlane-blk and on one of qemu-storage-daemon, in one VM, in turns";
    test "lend-vs-local" = |run, to| lend_vs_local::small(run, to),
        "fio on QEMU's own NVMe and on a lent one over the same file, in turns (small form)";
    long "lend-vs-local-long" = |run, to| lend_vs_local::long(run, to),
        "fio on QEMU's own NVMe, on a lent one over the same file, and on NVMe/TCP to another VM, \
         in turns";
    test "net-vs-tap" = |run, to| net_vs_tap::versus(run, Form::Small, to),
        "iperf3 and a ping-pong over farlane-net and over QEMU's own tap backend, in one VM, in \
         turns (small form)";
    long "net-vs-tap-long" = |run, to| net_vs_tap::versus(run, Form::Long, to),
        "iperf3 and a ping-pong over farlane-net and over QEMU's own tap backend, in one VM, in \
         turns";
    test "rdma-vs-rxe" = |run, to| rdma_vs_rxe::versus(run, Form::Small, to),
        "ib_write_bw and ib_send_lat -e over Linux rdma_rxe, over Farlane's library, and the first \
         also over the RDMA device of the guests' kernel, in turns (small form)";
    long "rdma-vs-rxe-long" = |run, to| rdma_vs_rxe::versus(run, Form::Long, to),
        "ib_write_bw, also with messages of 8 bytes, ib_write_lat and ib_send_lat -e over Linux \
         rdma_rxe, over Farlane's library and over the RDMA device of the guests' kernel, in turns";
}
