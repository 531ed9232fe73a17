//! NFS over RDMA: a file tree that one guest writes into a file system of the other.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::report::Report;

use super::{COPY, MOUNTED};
use crate::disks::node;
use crate::mounted;
use crate::stock::Stock;

/// Where NFS listens at RDMA (RFC 8267).
const PORT: u16 = 20049;

/// Serves `/under`. Without the daemons that would answer the server's questions the answers are
/// given before. Flags: any port, no check of the path below, it has a number of its own.
const SERVE: &str = "modprobe nfsd && modprobe rpcrdma && mount -t nfsd nfsd /proc/fs/nfsd && \
    cd /proc/fs/nfsd && echo 10 >nfsv4gracetime && echo '-3 +4' >versions && \
    echo 'rdma @PORT@' >portlist && echo 2 >threads && mkdir -p /under && \
    mkfs.ext4 -q @NODE@ && mount -t ext4 @NODE@ /under && \
    echo 'nfsd @PEER@ 2147483647 there' >/proc/net/rpc/auth.unix.ip/channel && \
    echo 'there /under 2147483647 9218 -2 -2 0' >/proc/net/rpc/nfsd.export/channel && \
    echo 'there 1 \\x00000000 2147483647 /under' >/proc/net/rpc/nfsd.fh/channel";

const STOP: &str = "echo 0 >/proc/fs/nfsd/threads && umount /proc/fs/nfsd";

pub fn serve(stock: &Stock<'_>) -> Result<()> {
    let server = &stock.a;
    let line = SERVE
        .replace("@PORT@", &PORT.to_string())
        .replace("@NODE@", &node(server, MOUNTED)?)
        .replace("@PEER@", stock.b.address()?);
    let failed = || server.run("dmesg | tail -20").unwrap_or_default();
    server.run(&line).with_context(failed)?;
    Ok(())
}

/// Mounts it at the client.
pub fn mount(stock: &Stock<'_>, at: &str) -> Result<()> {
    let (from, to) = (stock.a.address()?, stock.b.address()?);
    stock.b.run(&format!(
        "modprobe nfsv4 && modprobe rpcrdma && mount -t nfs4 -o \
         vers=4.2,proto=rdma,port={PORT},addr={from},clientaddr={to} {from}:/ {at} || \
         {{ dmesg | tail -20; exit 1; }}"
    ))?;
    Ok(())
}

/// Serves it no more.
pub fn stop(stock: &Stock<'_>) -> Result<()> {
    stock.a.run(&format!("{STOP} && umount /under"))?;
    Ok(())
}

pub fn run(stock: &Stock<'_>, report: &mut Report) -> Result<()> {
    let (server, client) = (&stock.a, &stock.b);
    let before = stock.moved()?;
    mount(stock, "/mnt")?;
    client.run(&format!("{COPY} && sync"))?;
    let files = mounted::sum(client)?;
    // What it has in its memory it would not read again.
    client.run("umount /mnt && echo 3 >/proc/sys/vm/drop_caches")?;
    mount(stock, "/mnt")?;
    mounted::check(client)?;
    let bytes = client.run("cd /mnt && cat $(find . -type f) | wc -c")?;
    let bytes: u64 = bytes.trim().parse()?;
    server.run("cd /under && sha256sum -c sums >/tmp/check")?;
    client.run("umount /mnt")?;
    let moved = stock.moved()? - before;
    ensure!(
        moved >= 2 * bytes,
        "{bytes} bytes were written and read, and the daemon has moved {moved}"
    );
    report.tell(
        "NFS over RDMA",
        "sha256sum -c at the client, mounted again, and at the server",
        format!("{files} files, {} KiB", bytes >> 10),
    );
    Ok(())
}
