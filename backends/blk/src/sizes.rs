//! Files that grow and shrink.

use crate::disk::Disk;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks at the sizes of disks.
const LOOK: Duration = Duration::from_secs(1);

/// Looks at the sizes of disks now and then, from a thread of its own.
///
/// # Errors
/// When the thread cannot be started.
pub fn watch(disks: Vec<Arc<Disk>>) -> io::Result<()> {
    std::thread::Builder::new()
        .name("sizes".to_owned())
        .spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                disks.iter().for_each(|disk| disk.look_at_size());
            }
        })
        .map(drop)
}
