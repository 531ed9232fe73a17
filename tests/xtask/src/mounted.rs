//! Files on a disk that a guest has mounted at `/mnt`: copied there, and found again later.

use anyhow::Result;
use farlane_kit::guest::Guest;

/// Copies files of the guest to the disk.
pub const COPY: &str = "cp -r /usr/sbin /usr/lib/modules /mnt/";

/// Writes the checksums of all files to the disk. Returns how many there are.
pub fn sum(guest: &Guest) -> Result<String> {
    let count = guest.run(
        "cd /mnt && find . -type f ! -name sums | sort | xargs sha256sum >sums && wc -l <sums",
    )?;
    Ok(count.trim().to_owned())
}

/// All files are as they were when their checksums were written.
pub fn check(guest: &Guest) -> Result<()> {
    guest.run("cd /mnt && sha256sum -c sums >/tmp/check || { grep -v OK /tmp/check; exit 1; }")?;
    Ok(())
}
